"""The tables of the study of gradient estimators, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import pandas as pd
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.experiments.enumeration import random_prompts, tiny_policy
from grade.experiments.estimators.measure import enumerated, study
from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS, Rows, Setting, Variant, gradient_rows
from grade.experiments.estimators.measure.tiny_rewards import tiny_rewards
from grade.experiments.measured import Measurements as Base

BATCHES = tuple(2**i for i in range(13))
"""Numbers of samples at which the expected cosine is tabulated."""
ENUMERATED = ("quality", "mse_ratio")
"""Tables of the enumerated policy."""


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


class Measurements(Base[Settings]):
    """Gradients at fixed weights and prompts, in repeated batches.

    On a policy whose every completion is enumerated, so that bias is exact; then on a language model. Raw gradients are
    kept in memory only: the tables hold their statistics.
    """

    Settings = Settings
    tables = (*ENUMERATED, "worth", "cosine", "hybrid", "spread")
    timed = ("speed",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if not settings.enumerated:
            self.tables = tuple(name for name in self.tables if name not in ENUMERATED)

    @cached_property
    def _tiny(self) -> Setting:
        s, policy = self.settings, tiny_policy()
        variants = enumerated.variants(s.tiny_tokens - 1, s.tiny_taus, s.tiny_topk, s.tiny_draws)
        return Setting(policy, random_prompts(policy, s.tiny_prompts), s.tiny_group, s.tiny_tokens,
                       tiny_rewards(policy), variants, POLICY_GRADIENTS, kl=s.tiny_kl)  # fmt: skip

    @cached_property
    def _exact(self) -> dict[str, Tensor]:
        return enumerated.exact_gradients(self._tiny)

    @cached_property
    def _tiny_rows(self) -> Rows:
        return gradient_rows(self._tiny, self.settings.tiny_rows)

    @cached_property
    def _rows(self) -> dict[str, Rows]:
        """Gradients on the language model by policy."""
        s, found = self.settings, {}
        for policy, adapter in s.adapters.items():
            setting = study.load_setting(
                s.backbone_dir, adapter, s.reviews_dir, {"bag": s.bag_dir, "trunk": s.trunk_dir}, s.depths, s.variants,
                s.prompts, s.prompt_tokens, s.group, s.new_tokens, s.depth_reviews, s.dtype, s.device,
            )  # fmt: skip
            found[policy] = gradient_rows(setting, s.rows)
        return found

    def quality(self) -> pd.DataFrame:
        """Bias and variance against the exact gradient; see `enumerated.quality_table`."""
        return enumerated.quality_table(self._tiny_rows, self._exact)

    def mse_ratio(self) -> pd.DataFrame:
        """Squared error of `gumbel_rao` over that of `ste`, both with every hop; see `enumerated.mse_ratio_table`."""
        s = self.settings
        return enumerated.mse_ratio_table(
            self._tiny_rows, self._exact, list(self._tiny.rewards), s.tiny_draws, s.tiny_tokens - 1
        )

    def worth(self) -> pd.DataFrame:
        """What one sample of each estimator is worth; see `study.summary`. Column also policy."""
        return self._by_policy(study.summary)

    def cosine(self) -> pd.DataFrame:
        """Expected cosine with the true gradient; see `study.cosine_curves`. Column also policy."""
        return self._by_policy(lambda rows: study.cosine_curves(rows, BATCHES))

    def hybrid(self) -> pd.DataFrame:
        """Gain of the blend with the chosen estimator; see `study.hybrid_table`. Column also policy."""
        s = self.settings
        return self._by_policy(lambda rows: study.hybrid_table(rows, s.chosen.name, s.hybrid_batches))

    def spread(self) -> pd.DataFrame:
        """The paper's "variance" beside the variance; see `study.spread_table`. Column also policy."""
        return self._by_policy(study.spread_table)

    def speed(self) -> pd.DataFrame:
        """Time of a sample and worth per second; see `study.speed_table`. Column also policy."""
        return self._by_policy(study.speed_table)

    def _by_policy(self, table) -> pd.DataFrame:
        """One table below the other, the policy in the first column."""
        parts = [table(rows).assign(policy=policy) for policy, rows in self._rows.items()]
        joined = pd.concat(parts, ignore_index=True)
        return joined[["policy", *(name for name in joined.columns if name != "policy")]]
