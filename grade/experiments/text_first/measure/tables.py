"""The tables of the experiment on scored text, and the settings that they depend on.

A subject (a policy with its reward, or a variant of one) is a grid of runs.
"""

from functools import cached_property
from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from grade.errors import InputError
from grade.experiments.reward_runs import Method, RunSettings
from grade.experiments.text_first.measure.runs import TextBench, TextGrid, text_runs
from grade.gradients.methods import Rate

SMOKE = TextGrid(
    rewards=["bag"], methods=["offline", "auto_texts", "rloo"], target_kls=[1.0], completions=8, steps=4,
    eval_every=2, eval_prompts=16, sources=["reference:256"],
    own={"offline": {"own_completions": 32}},
)  # fmt: skip


class Settings(RunSettings):
    """Models, subjects and sizes."""

    grids: dict[str, TextGrid] = Field({"tiny_bag": SMOKE}, min_length=1)  # training runs by subject
    chosen_rates: dict[Method, Rate] = {"rloo": 1.0e-2, "auto_texts": 1.0e-2, "offline": 6.0e-3}  # learning rates

    @model_validator(mode="after")
    def _check(self) -> Self:
        if missing := {method for grid in self.grids.values() for method in grid.methods} - {*self.chosen_rates}:
            raise InputError("chosen_rates", self.chosen_rates, f"a rate of {', '.join(sorted(missing))}")
        return self

    @cached_property
    def trained_runs(self) -> pd.DataFrame:
        """All runs of the grids, seed by seed."""
        plans = [text_runs(self, subject, grid, self.chosen_rates) for subject, grid in self.grids.items()]
        tables = [self.run_all(self.bench(TextBench), runs) for runs in plans]
        return pd.concat(tables, ignore_index=True)


TABLES = {"runs": lambda s: s.trained_runs}
TIMED = {}
