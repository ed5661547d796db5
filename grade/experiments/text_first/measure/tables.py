"""The tables of the experiment on scored text, and the settings that they depend on.

A subject (a policy with its reward, or a variant of one) is a grid of runs, and fits by number of texts if it has any.
One can be measured alone, which takes minutes instead of hours:

    python -m grade measure text_first --config params/full/text_first.yaml --set 'subjects=[tiny_gold]' \
        --output-dir outputs/full/text_first

The tables then hold its rows and those that ``published`` has of the others, so a folder grows subject by subject.
"""

from functools import cached_property
from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from grade.errors import InputError
from grade.experiments.reward_runs import Method, RunSettings, published_table
from grade.experiments.text_first.measure.explained import TextFits, explained_table
from grade.experiments.text_first.measure.runs import TextBench, TextGrid, text_runs
from grade.gradients.methods import Rate

FITS = ("subject", "family", "texts")
"""Columns that name a fit."""
SMOKE = TextGrid(
    rewards=["bag"], methods=["offline", "auto_texts", "rloo"], target_kls=[1.0], completions=8, steps=4,
    eval_every=2, eval_prompts=16, sources=["reference:256"],
    own={"offline": {"own_completions": 32}},
)  # fmt: skip


class Settings(RunSettings):
    """Models, subjects and sizes."""

    subjects: list[str] = []  # those that are measured now; empty: all
    grids: dict[str, TextGrid] = Field({"tiny_bag": SMOKE}, min_length=1)  # training runs by subject
    chosen_rates: dict[Method, Rate] = {"rloo": 1.0e-2, "auto_texts": 1.0e-2, "offline": 6.0e-3}  # learning rates
    fits: dict[str, TextFits] = {}  # fits by subject

    @model_validator(mode="after")
    def _check(self) -> Self:
        if unknown := set(self.subjects) - {*self.grids, *self.fits}:
            raise InputError("subjects", sorted(unknown), f"some of {', '.join({**self.grids, **self.fits})}")
        if missing := {method for grid in self.grids.values() for method in grid.methods} - {*self.chosen_rates}:
            raise InputError("chosen_rates", self.chosen_rates, f"a rate of {', '.join(sorted(missing))}")
        return self

    def measures(self, subject: str) -> bool:
        """Whether a subject is measured, where it has not been."""
        return not self.subjects or subject in self.subjects

    @cached_property
    def trained_runs(self) -> pd.DataFrame:
        """All runs of the grids, seed by seed; of subjects that are not measured now those that are published."""
        parts = []
        for subject, grid in self.grids.items():
            bench = TextBench.of(self, ["sums" if "sums" in grid.rewards else grid.policy])
            runs = text_runs(self, subject, grid, self.chosen_rates)
            parts.append(self.run_all(bench, runs, self.measures(subject)))
        return _joined(parts)

    @cached_property
    def fitted(self) -> pd.DataFrame | None:
        """What texts explain, of every subject; None without fits."""
        known, seconds = (published_table(self.published, name, FITS)
                          for name in ("measured/explained", "timings/fit_seconds"))  # fmt: skip
        known, parts = known.merge(seconds, how="left"), []
        for subject, of in self.fits.items():
            rows = known[known["subject"] == subject]
            if self.measures(subject) and len(rows) != len(of.families) * len(of.sizes):
                rows = explained_table(self, subject, of)
            parts.append(rows)
        return _joined(parts) if parts else None


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def _without_seconds(table: pd.DataFrame | None) -> pd.DataFrame | None:
    return None if table is None else table.drop(columns="seconds", errors="ignore")


def _seconds(table: pd.DataFrame | None, names: tuple[str, ...]) -> pd.DataFrame | None:
    return None if table is None or "seconds" not in table else table[[*names, "seconds"]]


TABLES = {
    "runs": lambda s: _without_seconds(s.trained_runs),
    "explained": lambda s: _without_seconds(s.fitted),
}
TIMED = {
    "run_seconds": lambda s: _seconds(s.trained_runs, (*TextBench.names, "step")),
    "fit_seconds": lambda s: _seconds(s.fitted, FITS),
}
