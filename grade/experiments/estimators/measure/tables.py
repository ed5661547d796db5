"""The tables of the study of gradient estimators, and the settings that they depend on."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import pandas as pd
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.experiments.enumeration import random_prompts, tiny_policy
from grade.experiments.estimators.measure import enumerated, study
from grade.experiments.estimators.measure.enumerated import tiny_rewards
from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS, Rows, Setting, Variant, gradient_rows

BATCHES = tuple(2**i for i in range(13))
"""Numbers of samples at which the expected cosine is tabulated."""


class Settings(Config):
    """Sizes of the study: the enumerated policy (``tiny_*``), then a language model."""

    enumerated: bool = Field(True, description="whether the enumerated policy is measured; it has nothing to train")
    tiny_tokens: int = Field(2, ge=1, description="completion length T of the enumerated policy")
    tiny_prompts: int = Field(2, ge=1, description="its prompts B")
    tiny_group: int = Field(32, ge=2, description="its completions of a prompt in a batch, G")
    tiny_rows: int = Field(12, ge=3, description="its batches")
    tiny_taus: list[float] = Field([0.5], description="temperatures, besides 1")
    tiny_topk: int = Field(3, ge=1, description="a support smaller than the vocabulary of 5")
    tiny_draws: list[int] = Field([1, 8], min_length=1, description="draws M of gumbel_rao")
    tiny_kl: bool = Field(True, description="whether KL's gradient is judged too")
    backbone_dir: str = Field("", description="folder of the language model; empty: a tiny one with random rewards")
    runs_dir: str = Field("", description="folder of training runs, for the policy after training")
    trained_run: str = Field("ste-0", description="which of them")
    policies: list[Literal["before", "after"]] = Field(["before"], min_length=1, description="before or after training")
    bag_dir: str = Field("", description="folder of the reward on the embedding table")
    trunk_dir: str = Field("", description="folder of the reward through the frozen transformer")
    reviews_dir: str = Field("", description="folder of the review splits")
    depths: list[int] = Field([1], description="layers of rewards in between, which are trained here")
    depth_reviews: int = Field(80, ge=1, description="reviews that those are trained on")
    prompts: int = Field(2, ge=1, description="B")
    prompt_tokens: int = Field(4, ge=1, description="P")
    group: int = Field(4, ge=2, description="completions of a prompt in a batch, G")
    new_tokens: int = Field(4, ge=1, description="T")
    rows: int = Field(12, ge=12, description="batches; the blend is cross-fitted in four folds of at least three")
    taus: list[float] = Field([1.0], description="Gumbel temperatures of ste")
    hops: list[int] = Field([0, 1], description="feedback hops of ste")
    topk: int = Field(16, ge=0, description="size K of the perturbed support; 0: the whole vocabulary")
    others: bool = Field(True, description="gumbel_rao, reinmax and gumbel as well")
    chosen_tau: float = Field(1.0, gt=0, description="of the ste gradient whose worth is reported and which is blended")
    chosen_hops: int = Field(0, ge=0, description="its hops")
    hybrid_batches: list[int] = Field([8, 64, 512], description="batch sizes of the blend")
    device: str = Field("cpu", description="where the language model runs")
    dtype: str = Field("float32", description="type of its weights")

    @property
    def chosen(self) -> Variant:
        """The `ste` gradient whose worth is reported and which is blended."""
        return Variant("ste", self.chosen_tau, self.chosen_hops, self.topk)

    @property
    def variants(self) -> list[Variant]:
        """Relaxed estimators that are compared on the language model, the chosen one first."""
        grid = [self.chosen, *(Variant("ste", tau, hops, self.topk) for tau in self.taus for hops in self.hops)]
        if self.others:
            grid += [Variant(name, self.chosen_tau, self.chosen_hops, self.topk)
                     for name in ("gumbel_rao", "reinmax", "gumbel")]  # fmt: skip
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
        folders = {"before": "", "after": f"{self.runs_dir}/{self.trained_run}/adapter"}
        return {policy: folders[policy] for policy in self.policies}

    @cached_property
    def tiny(self) -> Setting:
        """The enumerated policy."""
        policy = tiny_policy()
        variants = enumerated.variants(self.tiny_tokens - 1, self.tiny_taus, self.tiny_topk, self.tiny_draws)
        return Setting(policy, random_prompts(policy, self.tiny_prompts), self.tiny_group, self.tiny_tokens,
                       tiny_rewards(policy), variants, POLICY_GRADIENTS, kl=self.tiny_kl)  # fmt: skip

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        """Its exact gradients by reward."""
        return enumerated.exact_gradients(self.tiny)

    @cached_property
    def enumerated_rows(self) -> Rows:
        """Its repeated gradients."""
        return gradient_rows(self.tiny, self.tiny_rows)

    @cached_property
    def gradients(self) -> dict[str, Rows]:
        """Repeated gradients on the language model by policy; kept in memory only."""
        rewards = {"bag": self.bag_dir, "trunk": self.trunk_dir}
        return {
            policy: gradient_rows(study.load_setting(
                self.backbone_dir, adapter, self.reviews_dir, rewards, self.depths, self.variants, self.prompts,
                self.prompt_tokens, self.group, self.new_tokens, self.depth_reviews, self.dtype, self.device,
            ), self.rows)
            for policy, adapter in self.adapters.items()
        }  # fmt: skip


def _quality(s: Settings) -> pd.DataFrame | None:
    """Bias and variance against the exact gradient; see `enumerated.quality_table`."""
    return enumerated.quality_table(s.enumerated_rows, s.exact) if s.enumerated else None


def _mse_ratio(s: Settings) -> pd.DataFrame | None:
    """Squared error of `gumbel_rao` over that of `ste`, both with every hop; see `enumerated.mse_ratio_table`."""
    if not s.enumerated:
        return None
    rewards = list(s.tiny.rewards)
    return enumerated.mse_ratio_table(s.enumerated_rows, s.exact, rewards, s.tiny_draws, s.tiny_tokens - 1)


def _by_policy(table: Callable[..., pd.DataFrame], *options: Callable[[Settings], Any]) -> Callable:
    """One table below the other, the policy in the first column."""

    def joined(s: Settings) -> pd.DataFrame:
        given = [option(s) for option in options]
        parts = [table(rows, *given).assign(policy=policy) for policy, rows in s.gradients.items()]
        whole = pd.concat(parts, ignore_index=True)
        return whole[["policy", *(name for name in whole.columns if name != "policy")]]

    return joined


TABLES = {
    "quality": _quality,
    "mse_ratio": _mse_ratio,
    "worth": _by_policy(study.summary),
    "cosine": _by_policy(study.cosine_curves, lambda s: BATCHES),
    "hybrid": _by_policy(study.hybrid_table, lambda s: s.chosen.name, lambda s: s.hybrid_batches),
    "spread": _by_policy(study.spread_table),
}
TIMED = {"speed": _by_policy(study.speed_table)}
