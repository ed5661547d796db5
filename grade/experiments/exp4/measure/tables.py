"""The tables of experiment 4, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.experiments.exp4.measure import steps
from grade.experiments.measured import Measurements as Base
from grade.experiments.traced import categories_table, timelines_table
from grade.memory.step import StepConfig
from grade.memory.trace import Trace, trace, trace_all

TIMELINES = ("loop", "replay")
"""Configurations whose live bytes are shown over a step: the re-running loop and the replay, at equal sizes."""


class Settings(Config):
    """Sizes of the traced step."""

    model: str = Field("tiny", description="shape of the model; the document's is qwen3-4b")
    prompt_tokens: int = Field(4, ge=1, description="P")
    batch_before: int = Field(2, ge=1, description="B of the step that failed, 4 in the document")
    batch_after: int = Field(1, ge=1, description="B after change 1, 2 in the document")
    tokens_before: int = Field(2, ge=1, description="T of the step that failed, 48 in the document")
    tokens_after: int = Field(1, ge=1, description="T after change 2, 32 in the document")
    processes: int = Field(1, ge=1, description="traces that run at once")


class Measurements(Base[Settings]):
    """The step that ran out of memory, its changes and this project's step, traced."""

    Settings = Settings
    tables = ("configurations", "categories", "timelines", "largest")
    timed = ("seconds",)

    @cached_property
    def steps(self) -> dict[str, StepConfig]:
        """Configurations by name."""
        s = self.settings
        return steps.configurations(
            s.model, s.prompt_tokens, (s.batch_before, s.batch_after), (s.tokens_before, s.tokens_after)
        )

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Their traces."""
        return trace_all(self.steps, self.settings.processes)

    def configurations(self) -> pd.DataFrame:
        """What each configuration needs; see `steps.configurations_table`."""
        return steps.configurations_table(self.steps, self.traces)

    def categories(self) -> pd.DataFrame:
        """Bytes at the peak by category; see `grade.experiments.traced.categories_table`."""
        return categories_table(self.traces)

    def timelines(self) -> pd.DataFrame:
        """Live bytes over a step, of all layers, for `TIMELINES`; see `grade.experiments.traced.timelines_table`."""
        return timelines_table({name: trace(self.steps[name], all_layers=True) for name in TIMELINES})

    def largest(self) -> pd.DataFrame:
        """The largest tensors at the peak of the re-running loop; see `steps.largest_table`."""
        return steps.largest_table(self.traces["loop"])

    def seconds(self) -> pd.DataFrame:
        """Seconds of each trace: columns configuration and seconds."""
        return pd.DataFrame(dict(configuration=name, seconds=t.seconds) for name, t in self.traces.items())
