"""The tables of the study of gradient estimators, and the settings that they depend on.

On an enumerated policy, bias and variance against the exact gradient. On a language model, without it: at fixed weights
and prompts, repeated batches give a policy gradient (`rloo`, unbiased, the stand-in for the truth) and the relaxed
gradients of the same completions; `grade.experiments.moments` turns them into worth and crossover. Gradients of all
parameters are kept through a sketch, which is the same for all rows and estimators and distorts cosines by about one
per cent.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field
from torch import Tensor, nn

from grade.config import Config
from grade.data.reviews import load_reviews, prompt_text
from grade.errors import InputError
from grade.experiments.enumeration import random_prompts, tiny_policy
from grade.experiments.estimators.measure.enumerated import exact_gradients, tiny_rewards
from grade.experiments.estimators.measure.rows import KL, POLICY_GRADIENTS, Rows, Setting, Variant, gradient_rows
from grade.experiments.intervals import interval
from grade.experiments.measured import Count, Positive, Several, Size
from grade.experiments.moments import Moments, crossover, moments, sketch, worth_interval
from grade.experiments.setting import TRAINED_RUN, load_policy
from grade.experiments.shallow import ShallowReward
from grade.memory.settings import Device
from grade.models.adapter import LoraSettings
from grade.models.backbone import DTYPES, Backbone
from grade.models.prompts import encode_prompts
from grade.rewards.model import load_reward
from grade.training.toy import toy_reviews

UNBIASED = "rloo"
_SKETCH = 2**15
"""Numbers that are kept of a gradient."""
_TINY_TOPK = 3
"""A support smaller than the enumerated policy's vocabulary of 5."""


class Settings(Config):
    """Sizes of the study: the enumerated policy (``tiny_*``), then a language model."""

    enumerated: bool = True  # whether the enumerated policy is measured; it has nothing to train
    tiny_tokens: Size = 2  # completion length T of the enumerated policy
    tiny_group: Several = 32  # its completions of each of two prompts in a batch, G
    tiny_rows: int = Field(12, ge=3)  # its batches
    tiny_taus: list[Positive] = [0.5]  # temperatures, besides 1
    tiny_draws: list[Size] = Field([1, 8], min_length=1)  # draws M of gumbel_rao
    tiny_kl: bool = True  # whether KL's gradient is judged too
    backbone_dir: str = ""  # folder of the language model; empty: a tiny one with random rewards
    runs_dir: str = ""  # folder of training runs, for the policy after training
    policies: list[Literal["before", "after"]] = Field(["before"], min_length=1)  # before or after training
    bag_dir: str = ""  # folder of the reward on the embedding table
    trunk_dir: str = ""  # folder of the reward through the frozen transformer
    reviews_dir: str = ""  # folder of the review splits
    depths: list[Size] = [1]  # layers of rewards in between, which are trained here
    depth_reviews: Size = 80  # reviews that those are trained on
    prompts: Size = 2  # B
    prompt_tokens: Size = 4  # P
    group: Several = 4  # completions of a prompt in a batch, G
    new_tokens: Size = 4  # T
    rows: int = Field(12, ge=3)  # batches
    taus: list[Positive] = [1.0]  # Gumbel temperatures of ste
    hops: list[Count] = [0, 1]  # feedback hops of ste
    topk: Count = 16  # size K of the perturbed support; 0: the whole vocabulary
    others: bool = True  # gumbel_rao, reinmax and gumbel as well
    device: Device = "cpu"  # where the language model runs
    dtype: Literal[tuple(DTYPES)] = "float32"  # type of its weights

    @property
    def chosen(self) -> Variant:
        """The `ste` gradient whose worth is reported: tau 1 and no hops."""
        return Variant("ste", topk=self.topk)

    @property
    def variants(self) -> list[Variant]:
        """Relaxed estimators that are compared on the language model, the chosen one first."""
        grid = [self.chosen, *(Variant("ste", tau, hops, self.topk) for tau in self.taus for hops in self.hops)]
        if self.others:
            grid += [Variant(name, topk=self.topk) for name in ("gumbel_rao", "reinmax", "gumbel")]
        return list(dict.fromkeys(grid))

    @property
    def rewards(self) -> list[str]:
        """Rewards on the language model, from the one that reads least of it to the one that reads all."""
        return ["bag", *(f"trunk{depth}" for depth in sorted(self.depths)), "trunk"]

    @property
    def adapters(self) -> dict[str, str]:
        """The adapter folder of each policy; empty before training."""
        if "after" in self.policies and not self.runs_dir:
            raise InputError("runs_dir", self.runs_dir, "the folder of training runs, for the policy after training")
        folders = {"before": "", "after": f"{self.runs_dir}/{TRAINED_RUN}/adapter"}
        return {policy: folders[policy] for policy in self.policies}

    @cached_property
    def tiny(self) -> Setting:
        """The enumerated policy, with every estimator over hops at tau 1, and over tau, K and M at all hops."""
        policy, full, most = tiny_policy(), self.tiny_tokens - 1, max(self.tiny_draws)
        grid = []
        for estimator in ("ste", "gumbel_rao", "reinmax", "gumbel"):
            grid += [Variant(estimator, 1.0, hops, draws=most) for hops in sorted({0, 1, 2, full}) if hops <= full]
            grid += [Variant(estimator, tau, full, draws=most) for tau in self.tiny_taus]
            grid += [Variant(estimator, 1.0, full, _TINY_TOPK, most)]
        grid += [Variant("gumbel_rao", 1.0, full, draws=m) for m in self.tiny_draws]
        return Setting(policy, random_prompts(policy, 2), self.tiny_group, self.tiny_tokens,
                       tiny_rewards(policy), list(dict.fromkeys(grid)), POLICY_GRADIENTS, kl=self.tiny_kl)  # fmt: skip

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """Its exact gradients by reward."""
        return exact_gradients(self.tiny)

    @cached_property
    def enumerated_rows(self) -> Rows:
        """Its repeated gradients."""
        return gradient_rows(self.tiny, self.tiny_rows)

    def setting(self, adapter: str) -> Setting:
        """A language model, prompts and rewards to take gradients of."""
        if self.backbone_dir:
            lora = None if adapter else LoraSettings()
            backbone = Backbone.load(self.backbone_dir, self.dtype, lora, adapter or None, self.device)
            rewards: dict[str, nn.Module] = {name: load_reward(path, backbone).to(self.device) for name, path in
                                             (("bag", self.bag_dir), ("trunk", self.trunk_dir))}  # fmt: skip
            texts = load_reviews(self.reviews_dir, "policy")
            labelled = load_reviews(self.reviews_dir, "reward") if self.depths else []
        else:
            backbone, _ = load_policy("", "", "")
            rewards, texts, labelled = tiny_rewards(backbone), toy_reviews(64, seed=1), toy_reviews(200, seed=2)
        n = self.depth_reviews
        for depth in self.depths:
            data, held = labelled[:n], labelled[n : n + n // 4]
            if not held:
                raise InputError("depth_reviews", n, f"less than {len(labelled)}, the size of the split")
            tokens = 64 if self.backbone_dir else 12
            rewards[f"trunk{depth}"] = ShallowReward(backbone, depth, data, held, tokens=tokens)
        if len(texts) < self.prompts:
            raise InputError("prompts", self.prompts, f"at most {len(texts)}, the size of the split")
        chosen = [prompt_text(r.text) for r in texts[: self.prompts]]
        batch = encode_prompts(backbone.tokenizer, chosen, self.prompt_tokens).to(backbone.device)
        size = sum(p.numel() for p in backbone.trainable_parameters())
        return Setting(backbone, batch, self.group, self.new_tokens, rewards, self.variants, (UNBIASED,),
                       project=sketch(size, _SKETCH))  # fmt: skip

    @cached_property
    def gradients(self) -> dict[str, Rows]:
        """Repeated gradients on the language model by policy; kept in memory only."""
        return {policy: gradient_rows(self.setting(adapter), self.rows) for policy, adapter in self.adapters.items()}


def _quality(s: Settings) -> pd.DataFrame | None:
    """Quality of each estimator, of one sample, relative to the exact gradient, on the enumerated policy.

    `grpo` is held against ``1 - 1/G`` of the gradient, its expectation (see `measure.rows.advantages`); for KL, where
    only a part of the gradient shrinks, it is left out. bias2, variance and mse are over ``|mu|^2``; along is the
    relative bias along mu, ``<m, mu> / |mu|^2 - 1``; n samples in all.
    """
    if not s.enumerated:
        return None
    rows, table = s.enumerated_rows, []
    for (reward, estimator), gradients in rows.gradients.items():
        if (reward, estimator) == (KL, "grpo"):
            continue
        truth = s.exact[reward] * (1 - 1 / rows.group if estimator == "grpo" else 1)
        m = moments(gradients, truth, rows.size)
        bias2, along = interval(m.bias2 / m.ref2), interval(m.inner / m.ref2 - 1)
        table.append(dict(
            reward=reward, estimator=estimator, bias2=bias2.value, bias2_stderr=bias2.stderr, along=along.value,
            along_stderr=along.stderr, variance=m.noise[0] / m.ref2[0], mse=m.mse()[0] / m.ref2[0],
            n=len(gradients) * rows.size,
        ))  # fmt: skip
    return pd.DataFrame(table)


def _mse_ratio(s: Settings) -> pd.DataFrame | None:
    """Squared error of `gumbel_rao` over that of `ste`, of one sample, both at tau 1 with every hop."""
    if not s.enumerated:
        return None
    rows, full, table = s.enumerated_rows, s.tiny_tokens - 1, []

    def mse(reward: str, variant: Variant) -> np.ndarray:
        return moments(rows.gradients[reward, variant.name], s.exact[reward], rows.size).mse()

    for reward in s.tiny.rewards:
        ste = mse(reward, Variant("ste", 1.0, full))
        for m in s.tiny_draws:
            ratio = interval(mse(reward, Variant("gumbel_rao", 1.0, full, draws=m)) / ste, geometric=True)
            table.append((reward, m, *ratio[:3]))
    return pd.DataFrame(table, columns=["reward", "draws", "ratio", "low", "high"])


Row = dict[str, Any]


def _by_policy(measure: Callable[[Settings, Rows], Iterable[Row]]) -> Callable[[Settings], pd.DataFrame]:
    """One table of the rows of all policies, the policy in the first column."""
    return lambda s: pd.DataFrame(
        {"policy": policy, **row} for policy, rows in s.gradients.items() for row in measure(s, rows)
    )


def _moments(rows: Rows) -> Iterator[tuple[str, str, Moments, Moments]]:
    """Every reward and estimator with its moments against the unbiased one's rows, and those of the unbiased one."""
    by_key = {(reward, name): moments(gradients, rows.gradients[reward, UNBIASED], rows.size)
              for (reward, name), gradients in rows.gradients.items()}  # fmt: skip
    for (reward, name), m in by_key.items():
        yield reward, name, m, by_key[reward, UNBIASED]


def _worth(s: Settings, rows: Rows) -> Iterator[Row]:
    """Worth of one sample in samples of the unbiased estimator and crossover batch, with 95 % intervals."""
    for reward, name, m, base in _moments(rows):
        value, cross = worth_interval(m, base), interval(crossover(m, base), geometric=True)
        yield dict(
            reward=reward, estimator=name, worth=value.value, worth_low=value.low, worth_high=value.high,
            crossover=cross.value, crossover_low=cross.low, crossover_high=cross.high,
            n=len(rows.gradients[reward, name]) * rows.size,
        )  # fmt: skip


TABLES = {
    "quality": _quality,
    "mse_ratio": _mse_ratio,
    "worth": _by_policy(_worth),
}
TIMED = {}
