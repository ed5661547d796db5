"""The tables of the experiment on scored text, and the settings that they depend on.

A subject (a policy with its reward, or a variant of one) is a grid of runs, and fits by number of texts if it has any.
One can be measured alone, which takes minutes instead of hours:

    python -m grade measure text_first --config params/full/text_first.yaml --set 'subjects=[tiny_gold]' \
        --output-dir outputs/full/text_first

The tables then hold its rows and those that ``published`` has of the others, so a folder grows subject by subject.
"""

from __future__ import annotations

import io
from functools import cached_property
from pathlib import Path
from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from grade.errors import InputError
from grade.experiments.measured import Positive, Size, kept_text, read_csv
from grade.experiments.reward_runs import Method, published_runs, run_all
from grade.experiments.rewards import Models
from grade.experiments.text_first.measure.explained import TextFits, explained_table
from grade.experiments.text_first.measure.runs import NAMES, TextBench, TextGrid, text_runs
from grade.gradients.methods import Rate

FITS = ("subject", "family", "texts")
"""Columns that name a fit."""
SMOKE = TextGrid(
    rewards=["bag"], methods=["offline", "auto_texts", "rloo"], target_kls=[1.0], completions=8, steps=4,
    eval_every=2, eval_prompts=16, sources=["reference:256"],
    own={"offline": {"own_completions": 32}},
)  # fmt: skip


class Settings(Models):
    """Models, subjects and sizes."""

    subjects: list[str] = []  # those that are measured now; empty: all
    published: str = ""  # results whose runs and fits are not measured again
    peers: str = ""  # folder of the tables of other methods, as `python -m grade text-peers` wrote them; empty: none
    grids: dict[str, TextGrid] = Field({"tiny_bag": SMOKE}, min_length=1)  # training runs by subject
    chosen_rates: dict[Method, Rate] = {"rloo": 1.0e-2, "auto_texts": 1.0e-2, "offline": 6.0e-3}  # learning rates
    fits: dict[str, TextFits] = {}  # fits by subject
    kl_levels: list[Positive] = Field([0.5, 1.0], min_length=1)  # KL at which rewards are compared
    headline_level: float = 1.0  # one of kl_levels, and the target of the runs that samples are counted in
    processes: Size = 1  # worker processes of one thread each, for training

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.headline_level not in self.kl_levels:
            raise InputError("headline_level", self.headline_level, f"one of kl_levels = {self.kl_levels}")
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
        finished, parts = published_runs(self.published, NAMES, TextBench.columns), []
        for subject, grid in self.grids.items():
            policy = "sums" if "sums" in grid.rewards else grid.policy
            bench = TextBench({policy: self.base(policy)}, self.gold_file, self.reviews_dir, models=self)
            runs = text_runs(self, subject, grid, self.chosen_rates)
            parts.append(run_all(bench, runs, finished, self.processes, self.measures(subject)))
        return _joined(parts)

    @cached_property
    def fitted(self) -> pd.DataFrame | None:
        """What texts explain, of every subject; None without fits."""
        known = _published(self.published, "measured/explained")
        seconds = _published(self.published, "timings/fit_seconds")
        known, parts = known.merge(seconds, how="left") if len(known) and len(seconds) else known, []
        for subject, of in self.fits.items():
            rows = known[known["subject"] == subject] if len(known) else known
            if self.measures(subject) and len(rows) != len(of.families) * len(of.sizes):
                rows = explained_table(self, subject, of)
            parts.append(rows)
        return _joined(parts) if parts else None

    @cached_property
    def contest(self) -> pd.DataFrame | None:
        """The evaluations of other methods; None where there are none."""
        files = sorted(Path(self.peers).glob("**/*.csv")) if self.peers else []
        tables = [table for table in map(read_csv, map(str, files)) if {"reward_name", "reward_calls"} <= {*table}]
        return _joined(tables) if tables else None


def _joined(parts: list[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)


def _published(folder: str, name: str) -> pd.DataFrame:
    text = kept_text(f"{folder}/{name}.csv") if folder else ""
    return read_csv(io.StringIO(text)) if text else pd.DataFrame()


def _without_seconds(table: pd.DataFrame | None) -> pd.DataFrame | None:
    return table if table is None else table.drop(columns="seconds", errors="ignore")


def _seconds(table: pd.DataFrame | None, names: tuple[str, ...]) -> pd.DataFrame | None:
    return table if table is None or "seconds" not in table else table[[*names, "seconds"]]


TABLES = {
    "runs": lambda s: _without_seconds(s.trained_runs),
    "explained": lambda s: _without_seconds(s.fitted),
    "peers": lambda s: _without_seconds(s.contest),
}
TIMED = {
    "run_seconds": lambda s: _seconds(s.trained_runs, (*NAMES, "step")),
    "fit_seconds": lambda s: _seconds(s.fitted, FITS),
    "peer_seconds": lambda s: _seconds(s.contest, ("policy", "reward_name", "method", "seed")),
}
