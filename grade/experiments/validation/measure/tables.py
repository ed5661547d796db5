"""The tables of the validation, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import pandas as pd
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.experiments.enumeration import random_direction, random_prompts, tiny_policy
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

    @cached_property
    def subject(self) -> tuple[Backbone, PromptBatch, int, Tensor]:
        """Policy, two prompts, T, and the direction of the update."""
        policy = tiny_policy()
        return policy, random_prompts(policy, 2), self.completion_tokens, random_direction(policy)


def _coverage(s: Settings) -> pd.DataFrame:
    """Coverage of the U-statistic's intervals; see `study.coverage`."""
    policy, _, length, _ = s.subject
    return pd.DataFrame(
        {"B": b, "repetitions": s.repetitions}
        | study.coverage(policy, length, b, s.coverage_group, s.repetitions, s.coverage_pool)
        for b in progress(s.coverage_prompts, "coverage")
    )


TABLES = {
    "first_order": lambda s: study.first_order_table(*s.subject, s.etas),
    "coverage": _coverage,
    "importance": lambda s: study.importance_table(
        *s.subject, s.importance_etas, s.importance_group, s.importance_repetitions
    ).assign(repetitions=s.importance_repetitions),
}
TIMED = {}
