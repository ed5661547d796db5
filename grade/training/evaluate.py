"""Held-out evaluation by ordinary sampling: reward, gold judge, KL.

Prompts, noise and batch order are fixed by a seed, so two policies are compared on the same prompts and the same noise,
and their difference can be paired. A prompt's noise depends on its place among the prompts, not on the batches or on
the process that samples it. Every metric is a mean with its standard error and n.

Left out: perplexity and diversity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from grade.errors import InputError
from grade.gradients.objective import Objective, sequence_mean
from grade.models.backbone import Backbone
from grade.models.noise import Draw, NoiseBlocks
from grade.models.prompts import PromptBatch, decode, encode_examples
from grade.models.sampling import generate
from grade.models.scoring import sequence_kl
from grade.rewards.base import Reward, RewardScope
from grade.stats import Estimate

if TYPE_CHECKING:
    from grade.rewards.gold import GoldJudge

Gather = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class Evaluation:
    """Values of one policy on n held-out prompts, one completion each.

    Attributes:
        prompts: Prompt texts, as cut for the model.
        completions: Completion texts.
        reward: The reward [n].
        gold: Gold judge's P(positive) [n], NaN without a judge.
        kl: Mean KL(policy || reference) over each completion's tokens, in nats per token, on the first m prompts [m].
        kl_max: Largest absolute KL at any position of those completions.
        parts: Each reward's values [n] by name, where the reward is a sum; NaN where one does not apply.
    """

    prompts: list[str]
    completions: list[str]
    reward: np.ndarray
    gold: np.ndarray
    kl: np.ndarray
    kl_max: float
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)

    def metrics(self) -> dict[str, float | int]:
        """Flat metrics ``val/...``: mean, standard error and n.

        Raises:
            InputError: If a value is not finite.
        """
        flat: dict[str, float | int] = {}
        for name, values in (("reward", self.reward), ("gold", self.gold), ("kl", self.kl)):
            if len(values) and not (name == "gold" and np.isnan(values).all()):  # no judge
                check_finite(name, values)
                estimate = Estimate.of(values)
                key = "kl" if name == "kl" else f"{name}_mean"
                flat[f"val/{key}"] = estimate.mean
                flat[f"val/{name}_stderr"] = estimate.stderr
                flat[f"val/{name}_n"] = estimate.n
        return flat

    def summary(self, beta: float, prefix: str = "eval") -> dict[str, float]:
        """Metrics as the Trainer logs them: ``eval_reward``, ``eval_reward_stderr``, ``eval_reward_n``, ``eval_kl``.

        Args:
            beta: Weight of KL in ``eval_loss``, the negative objective.
            prefix: Put before every name.
        """
        names = {name.removeprefix("val/").removesuffix("_mean"): value for name, value in self.metrics().items()}
        given = {name: values[np.isfinite(values)] for name, values in self.parts.items()}
        names |= {f"rewards/{name}/mean": float(values.mean()) for name, values in given.items() if len(values)}
        kl = names.get("kl", 0.0)
        names["loss"] = beta * kl - float(self.reward.mean())
        return {f"{prefix}_{name}": value for name, value in names.items()}

    def first(self, n: int) -> Evaluation:
        """The first n prompts alone; KL stays on its own prompts."""
        parts = {name: values[:n] for name, values in self.parts.items()}
        return Evaluation(
            self.prompts[:n], self.completions[:n], self.reward[:n], self.gold[:n], self.kl, self.kl_max, parts
        )

    def table(self) -> pd.DataFrame:
        """One row for each completion: prompt, completion, reward, the rewards it is the sum of, gold, KL."""
        kl = np.full(len(self.prompts), np.nan)
        kl[: len(self.kl)] = self.kl
        columns = {"prompt": self.prompts, "completion": self.completions, "reward": self.reward}
        columns |= {f"rewards/{name}": values for name, values in self.parts.items()}
        return pd.DataFrame(columns | {"gold": self.gold, "kl": kl, "kl_max": self.kl_max})

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Evaluation:
        """The evaluation that `table` was made of."""
        kl, prefix = table["kl"].to_numpy(), "rewards/"
        parts = {name.removeprefix(prefix): table[name].to_numpy() for name in table if name.startswith(prefix)}
        return cls(
            table["prompt"].tolist(), table["completion"].tolist(), table["reward"].to_numpy(),
            table["gold"].to_numpy(), kl[~np.isnan(kl)], float(table["kl_max"].iloc[0]), parts,
        )  # fmt: skip


def check_finite(name: str, values: np.ndarray) -> None:
    """Reject NaN and infinity: a mean without them would be that of other prompts.

    Args:
        name: What the values are.
        values: Of any shape.

    Raises:
        InputError: Naming it and the first bad value.
    """
    bad = values[~np.isfinite(values)]
    if bad.size:
        allowed = f"finite numbers in an evaluation; {bad.size} of {values.size} are not"
        raise InputError(name, float(bad.flat[0]), allowed)


@dataclass(frozen=True)
class Sampling:
    """How an evaluation samples.

    Attributes:
        max_new_tokens: T.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        batch_size: Prompts sampled at once.
        kl_prompts: Number of prompts, from the first, on which KL is computed (it needs a pass of the reference).
        seed: Seed of the noise.
        noise_block: Prompts whose noise is drawn together, see `grade.models.noise.NoiseBlocks`.
    """

    max_new_tokens: int = 24
    min_new_tokens: int = 0
    batch_size: int = 64
    kl_prompts: int = 64
    seed: int = 1
    noise_block: int = 64


def evaluate(
    backbone: Backbone,
    texts: Sequence[str],
    reward_model: Reward,
    judge: GoldJudge | None = None,
    *,
    max_new_tokens: int = 24,
    max_prompt_tokens: int = 12,
    min_new_tokens: int = 0,
    scope: RewardScope = "prompt_and_completion",
    batch_size: int = 64,
    kl_prompts: int = 64,
    seed: int = 1,
) -> Evaluation:
    """Sample one completion per prompt at temperature 1 and score it.

    Args:
        backbone: The policy.
        texts: Prompt texts.
        reward_model: The reward that training sees.
        judge: The gold judge, which scores the decoded prompt and completion.
        max_new_tokens: T.
        max_prompt_tokens: Prompts are cut to this many tokens.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        scope: What the reward scores.
        batch_size: Prompts sampled at once.
        kl_prompts: Number of prompts, from the first, on which KL is computed (it needs a pass of the reference).
        seed: Seed of the noise.

    Returns:
        The values, prompt by prompt.

    Raises:
        InputError: If logits, a reward, the judge's score or a KL are not finite.
    """

    def encode(rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        return encode_examples(backbone.tokenizer, rows, max_prompt_tokens, "right", warn_raw=False)

    examples = [{"prompt": text} for text in texts]
    sampling = Sampling(max_new_tokens, min_new_tokens, batch_size, kl_prompts, seed)
    return evaluate_examples(backbone, examples, encode, Objective(reward_model, scope=scope), sampling, judge)


@torch.no_grad()
def evaluate_examples(
    backbone: Backbone,
    examples: Sequence[Mapping[str, Any]],
    encode: Callable[[Sequence[Mapping[str, Any]]], PromptBatch],
    objective: Objective,
    sampling: Sampling,
    judge: GoldJudge | None = None,
    share: tuple[int, int] = (0, 1),
    gather: Gather = lambda rows: rows,
    attempt: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> Evaluation:
    """`evaluate` on rows of a dataset.

    Args:
        backbone: The policy.
        examples: Rows with a prompt.
        encode: From rows to prompts.
        objective: The reward and what it scores.
        sampling: Lengths, sizes and the seed.
        judge: The gold judge, which scores the decoded prompt and completion.
        share: This process's rank, and the number of processes.
        gather: Joins the lists of all processes.
        attempt: Does this process's work, which may fail on one of them.

    Returns:
        The values, prompt by prompt, on every process.

    Raises:
        InputError: If logits, a reward, the judge's score or a KL are not finite.
    """
    own = attempt(lambda: _own_batches(backbone, examples, encode, objective, sampling, judge, *share))
    batches = [values for _, values in sorted(gather(own), key=lambda pair: pair[0])]
    joined = {name: [value for batch in batches for value in batch[name]] for name in ("prompts", "completions")}
    arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in ("reward", "gold", "kl")}
    parts = {name: np.concatenate([b["parts"][name] for b in batches]) for name in batches[0]["parts"]}
    return Evaluation(**joined, **arrays, kl_max=max(batch["kl_max"] for batch in batches), parts=parts)


def _own_batches(
    backbone: Backbone, examples: Sequence[Mapping[str, Any]], encode: Callable[..., PromptBatch],
    objective: Objective, sampling: Sampling, judge: GoldJudge | None, rank: int, processes: int,
) -> list[tuple[int, dict[str, Any]]]:  # fmt: skip
    """The batches of one process, with their numbers."""
    generator, own = torch.Generator(backbone.device).manual_seed(sampling.seed), []
    noise = NoiseBlocks(
        generator, len(examples), backbone.vocab_size, sampling.max_new_tokens, sampling.noise_block
    )  # fmt: skip
    starts = range(0, len(examples), sampling.batch_size)
    # Each pass of a sharded base needs all processes: one that has no batch left does the last one again.
    rounds = len(starts) if backbone.shards is None else -(-len(starts) // processes) * processes
    for number in range(rank, rounds, processes):
        start = starts[min(number, len(starts) - 1)]
        stop = min(start + sampling.batch_size, len(examples))
        prompts = encode([examples[i] for i in range(start, stop)])
        drawn = noise.rows(start, stop)
        batch = _evaluate_batch(backbone, prompts, objective, sampling, judge, drawn, start)
        if number < len(starts):
            own.append((number, batch))
    return own


def _evaluate_batch(
    backbone: Backbone, prompts: PromptBatch, objective: Objective, sampling: Sampling, judge: GoldJudge | None,
    noise: Draw, start: int,
) -> dict[str, Any]:  # fmt: skip
    prompts = prompts.to(backbone.device)
    ids, mask = generate(backbone, prompts, sampling.max_new_tokens, noise, min_new_tokens=sampling.min_new_tokens)
    reward = objective.score(backbone, prompts, ids, mask).cpu().double().numpy()
    check_finite("reward", reward)
    before = [decode(backbone.tokenizer, i, m) for i, m in zip(prompts.ids, prompts.mask, strict=True)]
    after = [decode(backbone.tokenizer, i, m) for i, m in zip(ids, mask, strict=True)]
    gold = np.full(len(after), np.nan)
    if judge is not None:
        gold = judge.score([p + c for p, c in zip(before, after, strict=True)])
        check_finite("gold", gold)
    kl, kl_max, with_kl = np.zeros(0), 0.0, min(len(after), sampling.kl_prompts - start)
    rows = slice(0, max(with_kl, 1))
    each = sequence_kl(backbone, prompts[rows], ids[rows], mask[rows]) if backbone.anywhere(with_kl > 0) else None
    if with_kl > 0:
        kl, kl_max = sequence_mean(each, mask[rows]).cpu().double().numpy(), float(each.abs().max())
        check_finite("kl", kl)
    last = objective.reward_model.last
    parts = {} if last is None else {name: v.cpu().double().numpy() for name, v in last.values.items()}
    return {
        "prompts": before, "completions": after, "reward": reward, "gold": gold, "kl": kl, "kl_max": kl_max,
        "parts": parts,
    }  # fmt: skip
