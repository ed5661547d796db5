"""The tables of the experiment on any reward, and the settings that they depend on."""

from functools import cached_property
from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from grade.errors import InputError
from grade.experiments.reward_runs import (
    SEARCH_KL,
    Grid,
    Method,
    RunSettings,
    chosen_rates,
    grid_runs,
    search_runs,
)
from grade.gradients.methods import Rate

SMOKE = Grid(
    rewards=["rule", "trunk"], methods=["rloo", "auto", "plug_in", "ste"], target_kls=[2.0], completions=8, steps=3,
    eval_every=1, eval_prompts=8,
)  # fmt: skip


class Settings(RunSettings):
    """Models, rewards and sizes."""

    grids: list[Grid] = Field([SMOKE], min_length=1)  # training runs
    # method to learning rate, of an earlier search; the others, and those with null, are searched
    chosen_rates: dict[Method, Rate | None] = {"rloo": 1.0e-2, "auto": 1.0e-2, "plug_in": 1.0e-2, "ste": 1.0e-2}
    headline_kl: float = 2.0  # target for KL of the figures of samples; one of the grids'

    @model_validator(mode="after")
    def _check(self) -> Self:
        targets = sorted({target for grid in self.grids for target in grid.target_kls})
        if self.headline_kl not in targets:
            raise InputError("headline_kl", self.headline_kl, f"one of the grids' target_kls = {targets}")
        return self

    @cached_property
    def searched(self) -> pd.DataFrame:
        """The search for the methods without a chosen rate."""
        methods = dict.fromkeys(method for grid in self.grids for method in grid.methods)
        runs = search_runs(self, self.grids[0], [name for name in methods if self.chosen_rates.get(name) is None])
        return self.run_all(self.bench(on_search_prompts=True), runs)

    @cached_property
    def trained_runs(self) -> pd.DataFrame:
        """All runs of the grids: every method on every reward at every target for KL, seed by seed."""
        rates = self.chosen_rates | chosen_rates(self.searched, SEARCH_KL)
        tables = [self.run_all(self.bench(), grid_runs(self, grid, rates)) for grid in self.grids]
        return pd.concat(tables, ignore_index=True)


TABLES = {"search": lambda s: s.searched, "runs": lambda s: s.trained_runs}
TIMED = {}
