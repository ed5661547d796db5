"""Held-out evaluation by ordinary sampling: reward, gold judge, KL.

Prompts, noise and batch order are fixed by a seed, so two policies are compared on the same prompts and the same noise,
and their difference can be paired. The noise is of the whole vocabulary: with one number for each token the errors of
Experiment 6's differences are 1.1 to 2 times as large. A prompt's noise depends on its place among the prompts, not on
the batches or on the process that samples it. Every metric is a mean with its standard error and n.

Left out: perplexity and diversity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from accelerate.utils import gather_object
from torch import Tensor

from grade.errors import InputError
from grade.gradients.objective import Objective, sequence_mean
from grade.models.backbone import Backbone
from grade.models.noise import Draw, gumbel_noise
from grade.models.prompts import PromptBatch, decode, encode_examples
from grade.models.sampling import generate
from grade.models.scoring import sequence_kl
from grade.results import progress
from grade.rewards.base import Reward, RewardScope
from grade.stats import Estimate

NOISE_BLOCK = 64
"""Prompts whose noise is drawn together, see `NoiseBlocks`; another number is another sample."""
MEANS = {"reward": "reward_mean", "gold": "gold_mean", "kl": "kl"}
"""What is averaged, and the name of its mean."""


@dataclass(frozen=True)
class Evaluation:
    """Values of one policy on n held-out prompts, one completion each; `InputError` if one is not finite."""

    prompts: list[str]  # prompt texts, as cut for the model
    completions: list[str]  # completion texts
    reward: np.ndarray  # the reward [n], NaN where no function scored
    gold: np.ndarray  # gold judge's P(positive) [n], NaN without a judge
    # mean KL(policy || reference) over each completion's tokens, in nats per token, on the first m prompts [m]
    kl: np.ndarray
    kl_max: float  # largest absolute KL at any position of those completions
    # each reward's values [n] by name, where the reward is a sum; NaN where one does not apply
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    # KL of each of those m completions, the sum over its tokens [m]
    kl_per_completion: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        scored = ~np.isnan(self.reward) if self.parts else slice(None)
        for name, values in (("reward", self.reward[scored]), ("kl", self.kl)):
            bad = values[~np.isfinite(values)]
            if len(bad):
                raise InputError(name, float(bad[0]), f"finite numbers; {len(bad)} of {len(values)} are not")

    def metrics(self) -> dict[str, float | int]:
        """Flat metrics ``val/...``: mean, standard error and n."""
        flat: dict[str, float | int] = {}
        for name, mean in MEANS.items():
            values = getattr(self, name)
            values = values[~np.isnan(values)]
            if len(values):
                estimate = Estimate.of(values)
                flat |= {f"val/{mean}": estimate.mean, f"val/{name}_stderr": estimate.stderr,
                         f"val/{name}_n": estimate.n}  # fmt: skip
        return flat

    def summary(self, beta: float, prefix: str = "eval") -> dict[str, float]:
        """Metrics as the Trainer logs them: ``eval_reward``, ``eval_reward_stderr``, ``eval_reward_n``, ``eval_kl``.

        ``eval_loss`` is the negative objective, in which beta weighs KL per token. ``eval_kl_per_completion`` is in
        nats per completion.
        """
        names = {
            name.removeprefix("val/").removesuffix("_mean"): value
            for name, value in self.metrics().items()
            if value is not None
        }  # a single prompt has no standard error, and the Trainer prints numbers
        given = {name: values[np.isfinite(values)] for name, values in self.parts.items()}
        names |= {f"rewards/{name}/mean": float(values.mean()) for name, values in given.items() if len(values)}
        if len(self.kl_per_completion):
            names["kl_per_completion"] = float(self.kl_per_completion.mean())
        errors = {name: Estimate.of(values).stderr for name, values in given.items() if len(values) > 1}
        names |= {f"rewards/{name}/stderr": error for name, error in errors.items()}
        kl = names.get("kl", 0.0)
        names["loss"] = beta * kl - (float(np.nanmean(self.reward)) if "reward" in names else 0.0)
        return {f"{prefix}_{name}": value for name, value in names.items()}

    def first(self, n: int) -> Evaluation:
        """The first n prompts alone; KL stays on its own prompts."""
        cut = {name: getattr(self, name)[:n] for name in ("prompts", "completions", "reward", "gold")}
        return replace(self, **cut, parts={name: values[:n] for name, values in self.parts.items()})

    def table(self) -> pd.DataFrame:
        """One row for each completion: prompt, completion, reward, the rewards it is the sum of, gold, KL."""
        kl, whole = (
            np.pad(values, (0, len(self.prompts) - len(values)), constant_values=np.nan)
            for values in (self.kl, self.kl_per_completion)
        )
        columns = {"prompt": self.prompts, "completion": self.completions, "reward": self.reward}
        columns |= {f"rewards/{name}": values for name, values in self.parts.items()}
        return pd.DataFrame(columns | {"gold": self.gold, "kl": kl, "kl_per_completion": whole, "kl_max": self.kl_max})

    @classmethod
    def of_table(cls, table: pd.DataFrame) -> Evaluation:
        """The evaluation that tables were made of, one below the other."""
        kl, whole, prefix = table["kl"].to_numpy(), table["kl_per_completion"].to_numpy(), "rewards/"
        parts = {name.removeprefix(prefix): table[name].to_numpy() for name in table if name.startswith(prefix)}
        return cls(
            table["prompt"].tolist(), table["completion"].tolist(), table["reward"].to_numpy(),
            table["gold"].to_numpy(), kl[~np.isnan(kl)], float(table["kl_max"].max()), parts, whole[~np.isnan(whole)],
        )  # fmt: skip


@torch.no_grad()
def evaluate(
    backbone: Backbone,
    prompts: Sequence[str] | Sequence[Mapping[str, Any]],
    reward_model: Reward,
    judge: Any = None,
    *,
    max_new_tokens: int = 24,
    max_prompt_tokens: int = 12,
    min_new_tokens: int = 0,
    scope: RewardScope = "prompt_and_completion",
    batch_size: int = 64,
    kl_prompts: int = 64,
    seed: int = 1,
    encode: Callable[[Sequence[Mapping[str, Any]]], PromptBatch] | None = None,
    rank: int = 0,
    processes: int = 1,
) -> Evaluation:
    """Sample one completion per prompt by ordinary sampling and score it.

    Args:
        backbone: The policy.
        prompts: Texts, or rows with a ``prompt``.
        reward_model: The reward that training sees.
        judge: The gold judge, whose ``score(texts)`` gets each prompt with its completion.
        max_new_tokens: T.
        max_prompt_tokens: Prompts are cut to this many tokens.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        scope: What the reward scores.
        batch_size: Prompts sampled at once.
        kl_prompts: Number of prompts, from the first, on which KL is computed (it needs a pass of the reference).
        seed: Seed of the noise.
        encode: From rows to prompts, in place of cutting them to ``max_prompt_tokens``.
        rank: This process.
        processes: How many share the work.

    Returns:
        The values, prompt by prompt, on every process.

    Raises:
        InputError: If logits, a reward or a KL are not finite.
    """
    if encode is None:
        encode = partial(
            encode_examples, backbone.tokenizer, max_prompt_length=max_prompt_tokens, truncation="right", warn_raw=False
        )
    rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    objective = Objective(reward_model, scope=scope)
    generator = torch.Generator(backbone.device).manual_seed(seed)
    noise = NoiseBlocks(generator, len(rows), backbone.vocab_size, max_new_tokens, NOISE_BLOCK)
    starts, own = range(0, len(rows), batch_size), []
    # Each pass of a divided base needs all processes: one that has no batch left does the last one again.
    rounds = len(starts) if not backbone.lockstep else -(-len(starts) // processes) * processes
    numbers = range(rank, rounds, processes)
    for number in progress(numbers, "held-out prompts") if rank == 0 else numbers:
        start = starts[min(number, len(starts) - 1)]
        stop = min(start + batch_size, len(rows))
        batch = encode(rows[start:stop]).to(backbone.device)
        ids, mask = generate(backbone, batch, max_new_tokens, noise.rows(start, stop), min_new_tokens=min_new_tokens)
        reward = objective.score(backbone, batch, ids, mask).cpu().double().numpy()
        before = [decode(backbone.tokenizer, i, m) for i, m in zip(batch.ids, batch.mask, strict=True)]
        after = [decode(backbone.tokenizer, i, m) for i, m in zip(ids, mask, strict=True)]
        gold = np.full(len(after), np.nan)
        if judge is not None:
            gold = judge.score([p + c for p, c in zip(before, after, strict=True)])
        kl, whole, kl_max, with_kl = np.zeros(0), np.zeros(0), 0.0, min(len(after), kl_prompts - start)
        if backbone.anywhere(with_kl > 0):
            first = slice(0, max(with_kl, 1))
            each = sequence_kl(backbone, batch[first], ids[first], mask[first])
            if with_kl > 0:
                kl, kl_max = sequence_mean(each, mask[first]).cpu().double().numpy(), float(each.abs().max())
                whole = each.double().sum(-1).cpu().numpy()
        scores = objective.reward_model.last
        parts = {} if scores is None else {name: v.cpu().double().numpy() for name, v in scores.values.items()}
        if number < len(starts):
            own.append((number, Evaluation(before, after, reward, gold, kl, kl_max, parts, whole).table()))
    tables = sorted(gather_object(own) if processes > 1 else own, key=lambda pair: pair[0])
    return Evaluation.of_table(pd.concat([table for _, table in tables]))


class NoiseBlocks:
    """Gumbel noise of a list of prompts, T draws per prompt, which depends on a prompt's place in the list alone.

    One generator, not used elsewhere, goes through the list in blocks of ``size`` consecutive prompts. It draws a
    block's noise as a whole, once for each of T = ``draws`` tokens, then that of the next block. Prompts that are
    sampled together take their rows of it, whatever part of a block or of several blocks they are.
    """

    def __init__(self, generator: torch.Generator, prompts: int, vocab_size: int, draws: int, size: int) -> None:
        self._device, self._starts = generator.device, [generator.get_state()]
        self._prompts, self._vocab_size, self._draws, self._size = prompts, vocab_size, draws, size
        self._open: dict[int, Iterator[Tensor]] = {}  # blocks that are being read

    def rows(self, start: int, stop: int) -> Draw:
        """Noise [stop - start, V] of the prompts at these places, for one token after the other from the first on."""
        first, last = start // self._size, (stop - 1) // self._size
        while len(self._starts) <= last:  # a block begins where the one before it ends
            block = len(self._starts) - 1
            for _ in self._open.pop(block, self._block(block)):
                pass
        blocks = {block: self._block(block) for block in range(first, last + 1)}
        self._open |= blocks

        def draw(shape: tuple[int, ...]) -> Tensor:
            noise = torch.cat([next(block) for block in blocks.values()])
            noise = noise[start - first * self._size : stop - first * self._size]
            if noise.shape != shape:
                raise ValueError(f"noise of shape {tuple(noise.shape)} for logits of shape {shape}")
            return noise

        return draw

    def _block(self, block: int) -> Iterator[Tensor]:
        """Noise of a block, token by token."""
        generator = torch.Generator(self._device)
        generator.set_state(self._starts[block])
        length = min(self._size, self._prompts - block * self._size)
        for _ in range(self._draws):
            yield gumbel_noise((length, self._vocab_size), generator)
        if len(self._starts) == block + 1:
            self._starts.append(generator.get_state())
