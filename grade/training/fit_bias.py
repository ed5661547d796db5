r"""The token bias that a reward calls for, at a KL, without training (`grade.gradients.tilt` has the formulas).

Values of tokens come from

- texts that are there already, scored once (`grade.data.texts.read_texts`);
- ``reference:N``: N completions of the reference, `GROUP` of each prompt;
- ``gradient``: one gradient of a differentiable reward, averaged over `AVERAGED` completions of the reference, or over
  N with ``gradient:N``.

`GROUP` completions of the reference for each of `PROMPTS` prompts tell in any case how well the values explain rewards
within a prompt, what the bias will gain, and what no policy can exceed. The length then meets a KL, measured exactly
along completions of the biased policy. Left out: several processes.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grade.data.texts import read_texts, sample_texts, score_texts
from grade.errors import InputError
from grade.gradients.objective import Objective
from grade.gradients.tilt import Agreement, Law, fit_values, gradient_values, limit_at, predictions
from grade.models.backbone import Backbone
from grade.models.batch import PromptBatch
from grade.models.head import Head, chunk_rows
from grade.models.prompts import encode_examples
from grade.models.scoring import predicting_hidden, sequence_kl
from grade.rewards.rewards import make_rewards
from grade.stats import Estimate
from grade.training.config import GradeConfig
from grade.training.kl_budget import LAST_TOLERANCE, BatchKL, set_length

TARGET_KL = 5.0
"""Nats per completion, where neither an argument nor the settings say how many."""
PROMPTS, GROUP = 8, 64
"""Prompts, and completions of the reference for each: with 64 the limit is known up to about 1 nat."""
AVERAGED = 128
"""Completions whose gradients are averaged, of the ``PROMPTS * GROUP``."""
OWN, LAST = 64, 128
"""The length is set along `OWN` completions of the reference, then along as many of the biased policy, and again; what
it has come to is measured along `LAST` others."""
TOLERANCES = (0.03, LAST_TOLERANCE, LAST_TOLERANCE)
"""Relative errors in KL at which these lengths are found."""
LENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
"""Lengths of the bias that are predicted, as shares of the one that is found."""
LIMITS = (0.25, 0.5, 1.0, 2.0)
"""KLs at which the limit is asked for, in nats per completion."""
NOTHING = 0.02
"""R2 below which tokens explain nothing that would be worth a bias."""


@dataclass(frozen=True)
class BiasFit:
    """What `fit_bias` found. KL is in nats per completion; a gain is over the reference's mean reward, per prompt."""

    values: Tensor  # s [V], in units of the reward; the bias is proportional to them
    source: str  # texts, reference or gradient
    texts: int  # completions that the values come from
    r2: float  # share of rewards' variance within prompts that they explain, out of sample
    frontier: list[dict[str, float]]  # "kl" and "gain" of some lengths, predicted along the reference's completions
    limit: list[Law]  # the most gain (``reward``) of any policy at a KL, as far as `GROUP` samples can tell
    target_kl: float
    kl: Estimate  # of own completions, which were not used to find the length
    before: Estimate  # reward of the reference for their prompts
    gain: Estimate  # of own completions, paired by prompt
    likes: list[str]  # tokens with the largest values, of those that the reference has written
    dislikes: list[str]  # tokens with the smallest

    @property
    def predicted(self) -> float:
        """Gain at the target KL if the reward goes on as it begins; it grows about as the root of KL."""
        kl, gain = ([row[name] for row in self.frontier] for name in ("kl", "gain"))
        return float(np.interp(self.target_kl**0.5, np.sqrt(kl), gain))

    def numbers(self) -> dict[str, Any]:
        """All but the values, as JSON, with the `summary`."""
        found = asdict(self) | {"limit": [law._asdict() for law in self.limit], "summary": self.summary().splitlines()}
        del found["values"]
        for name in ("kl", "before", "gain"):
            found |= getattr(self, name).metrics(name)
        return found

    def summary(self) -> str:
        """A few lines for people."""
        limit = ", ".join(f"{law.reward:+.3g} ± {law.stderr:.1g} at {law.kl:g}" for law in self.limit)
        nothing = ["tokens alone explain nothing of this reward: train with --method rloo"] * (self.r2 < NOTHING)
        return "\n".join([
            f"R2 {self.r2:.3f}: share of the reward within a prompt that tokens alone explain "
            f"({self.source}, {self.texts} completions)",
            *nothing,
            f"predicted gain {self.predicted:+.3g} at {self.target_kl:g} nats per completion",
            f"limit of any policy {f'{limit} nats' if limit else 'unknown: some completions have no reward'}",
            f"reached KL {self.kl}, gain {self.gain}, from a reward of {self.before}",
            f"likes     {' '.join(map(repr, self.likes))}",
            f"dislikes  {' '.join(map(repr, self.dislikes))}",
        ])  # fmt: skip


@torch.no_grad()
def fit_bias(
    policy: Backbone,
    reward: Any,
    prompts: Sequence[str] | Sequence[Mapping[str, Any]],
    target_kl: float | None = None,
    texts: str | Path | Iterable[Mapping[str, Any]] | None = None,
    args: GradeConfig | None = None,
) -> BiasFit:
    """Give a policy the token bias that a reward calls for, at a KL to the policy as given, which is the reference.

    Args:
        policy: The policy. The bias is added to the one that it has; `Backbone.save_adapter` then saves the sum.
        reward: A reward or a list of them, as for `grade.training.loop.GradeTrainer`.
        prompts: Training prompts: texts, or rows with a ``prompt``.
        target_kl: In nats per completion; None: that of ``args``, else `TARGET_KL`.
        texts: Where values of tokens come from: a file, hub id or rows for `grade.data.texts.read_texts`,
            ``reference:N``, ``gradient`` or ``gradient:N``; None: the gradient if the reward has one, else
            ``reference:512``.
        args: How prompts are read, completions sampled and rewards added up, and the seed.

    Returns:
        The values with what is predicted and what was measured.

    Raises:
        InputError: For bad input, or a reward that is not finite.

    >>> from grade.training.toy import toy_task
    >>> task, args = toy_task(), GradeConfig(max_completion_length=8)
    >>> found = fit_bias(task.backbone, task.reward_model, task.train_prompts, 0.5, args=args)
    >>> found.r2 > 0.9, abs(found.kl.mean - 0.5) < 0.05, found.gain.mean > 3 * found.gain.stderr
    (True, True, True)
    """
    config = args or GradeConfig()
    policy, target = policy.view(None, config.temperature), target_kl or config.target_kl or TARGET_KL
    policy.set_reference(policy.policy_values())
    rewards = make_rewards(reward, policy, config.reward_weights, None, config.reward_scope)
    objective = Objective(rewards, scope=config.reward_scope)
    most, least = config.max_completion_length, config.min_completion_length
    order = itertools.cycle(np.random.default_rng(config.seed).permutation(len(prompts)).tolist())
    generator = torch.Generator(policy.device).manual_seed(config.seed)
    encode = partial(encode_examples, policy.tokenizer, **config.reading)
    sampled = partial(sample_texts, backbone=policy, completion_tokens=most, generator=generator, min_new_tokens=least)

    def drawn(number: int) -> PromptBatch:
        rows = [prompts[i] for i in itertools.islice(order, number)]
        return encode([{"prompt": row} if isinstance(row, str) else row for row in rows])

    if texts is None:
        texts = "gradient" if all(part.differentiable for part in rewards.learned) else "reference"
    named = isinstance(texts, str) and re.fullmatch(r"(reference|gradient)(?::([1-9]\d*))?", texts)
    source, number = named.groups() if named else ("texts", None)
    if source == "gradient":
        objective.require_gradient("texts: gradient")
    groups = max(PROMPTS, math.ceil(int(number or 1) / GROUP))
    with policy.reference():
        used = judged = sampled(drawn(groups).repeat(GROUP), rewards=rewards)
    if source == "reference":
        values, r2, slope = fit_values(judged.ids, judged.mask, judged.rewards, policy.vocab_size, group=GROUP)
    else:
        if source == "gradient":
            number = int(number or AVERAGED)
            used = judged[:: max(1, len(judged) // number)][:number]
            values = gradient_values(objective, policy, used)
        else:
            longest = config.max_prompt_length or judged.prompts.ids.shape[1]
            rows = list(read_texts(texts, policy.tokenizer, longest, most))
            if not rows:
                raise InputError(
                    "texts", "no row", f"rows with a completion, or texts of at least {longest + 2} tokens"
                )
            used = score_texts(rows, policy, rewards, completion_tokens=most, encode=encode)
            values, *_ = fit_values(used.ids, used.mask, used.rewards, policy.vocab_size, used.prompts)
        r2, slope, _ = Agreement.of(predictions(values, judged.ids, judged.mask), judged.rewards, GROUP)
    values = values.to(policy.device)

    few = judged[:: len(judged) // OWN]
    if policy.token_bias is None:
        policy.set_token_bias(torch.zeros(policy.vocab_size))
    for number, tolerance in enumerate(TOLERANCES):
        along = sampled(drawn(OWN), rewards=None) if number else few
        length, _ = set_length(policy, BatchKL(policy, along.batches(GROUP), least), values, target, tolerance)
    asked = drawn(LAST)
    after = sampled(asked, rewards=rewards)
    with policy.reference():
        before = sampled(asked, rewards=rewards).rewards
        hidden = predicting_hidden(policy, few.prompts, few.ids)[few.mask.bool()]
    kl = torch.cat([sequence_kl(policy, *each).sum(1) for each in after.batches(GROUP)])
    gain = after.rewards - before
    predicted = tilted(policy.ref_head, hidden, values, [length * share for share in LENGTHS]) / len(few)
    seen = judged.ids[judged.mask.bool()].bincount(minlength=len(values)) > 0
    return BiasFit(
        values, source, len(used), r2,
        [{"kl": kl, "gain": slope * gain} for kl, gain in predicted.tolist()],
        _limits(judged.rewards.view(-1, GROUP)), target, Estimate.of(kl),
        *(Estimate.of(values[values.isfinite()]) for values in (before, gain)),
        *extremes(values * seen, policy.tokenizer),
    )  # fmt: skip


def tilted(head: Head, hidden: Tensor, values: Tensor, lengths: Sequence[float]) -> Tensor:
    """KL of biases ``c s``, and how much ``E[s]`` they gain, summed over hidden states [N, D]; [C, 2], float64.

    With ``p = softmax(l / temperature)`` of the head's logits l and ``k = c / temperature``,
    ``KL = k E_c[s] - log E_p[exp(k s)]``. Logits exist for `grade.models.head.chunk_rows` rows at a time.
    """
    total = torch.zeros(len(lengths), 2, dtype=torch.float64)
    for rows in hidden.split(chunk_rows(len(values), len(hidden))):
        logits = head(rows)
        s = values.to(logits)
        mean = logits.softmax(-1) @ s
        for i, length in enumerate(lengths):
            k = length / head.temperature
            biased = logits + k * s
            expected = biased.softmax(-1) @ s
            kl = k * expected - biased.logsumexp(-1) + logits.logsumexp(-1)
            total[i] += torch.stack([kl.sum(), (expected - mean).sum()]).to(total)
    return total


def _limits(rewards: Tensor) -> list[Law]:
    """The limit at `LIMITS` of rewards [prompts, n] relative to their prompt's mean, as far as n can tell."""
    complete = rewards[rewards.isfinite().all(1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        laws = [limit_at(complete - complete.mean(1, keepdim=True), kl) for kl in LIMITS]
    return [law for law in laws if law.kl > 0]


def extremes(values: Tensor, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Texts of the ten tokens with the largest values [V], and of those with the smallest, from the end on."""

    def text(token: int) -> str:
        # Of a part of a letter the text is a replacement character, and the token's name says more.
        decoded = tokenizer.decode([token])
        return tokenizer.convert_ids_to_tokens(token) if "\ufffd" in decoded else decoded

    order = values.argsort().tolist()
    return [text(token) for token in order[:-11:-1]], [text(token) for token in order[:10]]
