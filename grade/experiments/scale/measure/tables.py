"""The tables of the experiment on scale, and the settings that they depend on.

What is measured is imported where it is used: a smoke test needs only the tracer.
"""

from __future__ import annotations

from typing import Any, get_args

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.experiments.measured import Measurements as Base
from grade.experiments.measured import read_table
from grade.memory.sharded import Sharding
from grade.memory.step import StepConfig
from grade.memory.trace import trace

_COLUMNS = {
    "fsdp2": "method max_rel_diff bytes bytes_0 bytes_1 adapter_bytes",
    "sharded": "step rank traced tracked rel_error traced_received tracked_received whole",
    "law": "sampler n p mean_ratio largest_difference",
    "training": "seed sampler before after mean_ratio largest_difference",
    "fits": "run wall_seconds cpu_seconds settings batch_size max_new_tokens",
    "sampling": "batch round sampler seconds cpu_seconds",
}
"""Of the tables that a smoke test leaves empty."""


class Settings(Config):
    """Sizes of the experiment on scale."""

    model: str = Field("tiny", description="shape of the traced model")
    batch: int = Field(2, ge=1, description="B of the traced step")
    prompt_tokens: int = Field(8, ge=1, description="P")
    new_tokens: int = Field(8, ge=1, description="T")
    lean_batch: int = Field(2, ge=1, description="B of the lean step")
    lean_tokens: int = Field(8, ge=1, description="its P and T")
    gpus: list[int] = Field([1, 2], min_length=1, description="GPUs that train together, traced")
    methods: list[str] = Field([], description="methods that are trained in one process and in two")
    steps: int = Field(5, ge=1, description="optimizer steps of each")
    sharded_steps: list[str] = Field([], description="steps whose traced peak is held against two real processes")
    fits_model: str = Field("", description="shape of the model that a budget is searched for; empty: no search")
    fits_budget: str = Field("24GiB", description="that budget")
    fits_repeats: int = Field(1, ge=1, description="how often the search is timed")
    policy_dir: str = Field("", description="folder of the policy that samplers are compared on; empty: none")
    samplers: list[str] = Field(["own", "shared"], min_length=1, description="samplers; own first")
    draws: int = Field(20_000, ge=1, description="draws of one position")
    training_seeds: list[int] = Field([], description="seeds of a training with each sampler")
    training_steps: int = Field(20, ge=1, description="its optimizer steps")
    sampling_dir: str = Field("", description="folder of the policy whose sampling is timed; empty: none")
    sampling_batches: list[int] = Field([8, 64], min_length=1, description="completions in a batch, groups of 8")
    sampling_repeats: int = Field(5, ge=2, description="rounds")
    sampling_file: str = Field("", description="table of an earlier timing, with TRL in it; empty: timed here")


class Measurements(Base[Settings]):
    """A divided base against a whole one, what fits, and samples from other engines."""

    Settings = Settings
    tables = ("fsdp2", "sharded", "gpus", "lean", "law", "training")
    timed = ("fits", "sampling")

    def fsdp2(self) -> pd.DataFrame:
        """Every method in one process and in two, in float64, without rounding; see `sharded.fsdp2_table`."""
        from grade.experiments.scale.measure.sharded import fsdp2_table

        methods = self.settings.methods
        return fsdp2_table(self.settings.steps, methods, "float64") if methods else _empty("fsdp2")

    def sharded(self) -> pd.DataFrame:
        """Traced against tracked peaks of two processes; see `sharded.sharded_memory_table`."""
        from grade.experiments.scale.measure.sharded import sharded_memory_table

        names = self.settings.sharded_steps
        return sharded_memory_table(names) if names else _empty("sharded")

    def gpus(self) -> pd.DataFrame:
        """Traced peaks of one of several GPUs: columns gpus, sharding, peak, received, and a category each, bytes."""
        s = self.settings
        sizes: dict[str, Any] = dict(prompt_tokens=s.prompt_tokens, max_new_tokens=s.new_tokens)
        step, rows = StepConfig(model=s.model, batch_size=s.batch, **sizes), []
        for sharding in get_args(Sharding):
            for gpus in s.gpus:
                found = trace(step, processes=gpus, sharding=sharding)
                rows.append(dict(gpus=gpus, sharding=sharding, peak=found.peak, received=found.received)
                            | dict(found.categories))  # fmt: skip
        return pd.DataFrame(rows)

    def lean(self) -> pd.DataFrame:
        """The lean step by phase; see `lean.lean_table`."""
        from grade.experiments.scale.measure.lean import lean_table

        return lean_table(self.settings.model, self.settings.lean_batch, *2 * (self.settings.lean_tokens,))

    def law(self) -> pd.DataFrame:
        """Chi-square of one position for each sampler; see `sampling.law_table`."""
        from grade.experiments.scale.measure.sampling import law_table

        s = self.settings
        return law_table(s.draws, s.policy_dir, s.samplers) if s.policy_dir else _empty("law")

    def training(self) -> pd.DataFrame:
        """Training with each sampler; see `sampling.training_table`."""
        from grade.experiments.scale.measure.sampling import training_table

        s = self.settings
        if not s.training_seeds:
            return _empty("training")
        return training_table(s.training_seeds, s.samplers, max_steps=s.training_steps)

    def fits(self) -> pd.DataFrame:
        """Seconds of a search for settings that fit; see `fits.fits_table`."""
        from grade.experiments.scale.measure.fits import fits_table

        s = self.settings
        return fits_table(s.fits_model, s.fits_budget, s.fits_repeats) if s.fits_model else _empty("fits")

    def sampling(self) -> pd.DataFrame:
        """Seconds per completion of each sampler; see `sampling.sampling_seconds`."""
        from grade.experiments.scale.measure.sampling import sampling_seconds

        s = self.settings
        if s.sampling_file:
            return read_table(s.sampling_file.removesuffix(".csv"))
        if not s.sampling_dir:
            return _empty("sampling")
        return sampling_seconds(s.sampling_batches, s.sampling_repeats, s.sampling_dir)


def _empty(table: str) -> pd.DataFrame:
    return pd.DataFrame(columns=_COLUMNS[table].split())
