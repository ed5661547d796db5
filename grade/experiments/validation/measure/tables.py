"""The tables of the validation, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import pandas as pd
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.experiments.enumeration import random_direction, random_prompts, tiny_policy
from grade.experiments.measured import Measurements as Base
from grade.experiments.measured import progress
from grade.experiments.validation.measure import study
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch


class Settings(Config):
    """Sizes of the validation."""

    completion_tokens: int = Field(3, ge=1, description="T")
    etas: list[float] = Field(
        [1e-4, 1e-5, 1e-6], min_length=1, description="step sizes along a direction of norm 1, largest first"
    )
    coverage_prompts: list[Annotated[int, Field(ge=2)]] = Field([8, 32], description="B of the U-statistic")
    coverage_group: int = Field(4, ge=2, description="G")
    coverage_pool: int = Field(3, ge=1, description="prompts in the population")
    repetitions: int = Field(40, ge=2, description="draws whose intervals are counted")
    importance_etas: list[float] = Field([0.1, 0.5], description="step sizes of importance sampling")
    importance_group: int = Field(64, ge=2, description="completions of each prompt")
    importance_repetitions: int = Field(10, ge=2, description="draws")


class Measurements(Base[Settings]):
    """The probe's estimators against every enumerated completion of a tiny random GPT-2 in float64."""

    Settings = Settings
    tables = ("first_order", "coverage", "importance")

    @cached_property
    def policy(self) -> Backbone:
        """The policy."""
        return tiny_policy()

    @cached_property
    def prompts(self) -> PromptBatch:
        """Two prompts."""
        return random_prompts(self.policy, 2)

    @cached_property
    def vector(self) -> Tensor:
        """The direction of the update."""
        return random_direction(self.policy)

    def first_order(self) -> pd.DataFrame:
        """Predicted and true change against step size; see `study.first_order_table`."""
        return study.first_order_table(
            self.policy, self.prompts, self.settings.completion_tokens, self.vector, self.settings.etas
        )

    def coverage(self) -> pd.DataFrame:
        """Coverage of the U-statistic's intervals; see `study.coverage`. Columns also B and repetitions."""
        s = self.settings
        return pd.DataFrame(
            {"B": b, "repetitions": s.repetitions}
            | study.coverage(self.policy, s.completion_tokens, b, s.coverage_group, s.repetitions, s.coverage_pool)
            for b in progress(s.coverage_prompts, "coverage")
        )

    def importance(self) -> pd.DataFrame:
        """Importance sampling against the true change; see `study.importance_table`. Column also repetitions."""
        s = self.settings
        table = study.importance_table(
            self.policy, self.prompts, s.completion_tokens, self.vector, s.importance_etas, s.importance_group,
            s.importance_repetitions,
        )  # fmt: skip
        return table.assign(repetitions=s.importance_repetitions)
