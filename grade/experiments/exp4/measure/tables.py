"""The tables of experiment 4, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.experiments.exp4.measure import steps
from grade.experiments.traced import categories_table, timelines_table
from grade.memory.settings import StepConfig
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

    @cached_property
    def steps(self) -> dict[str, StepConfig]:
        """Configurations by name."""
        return steps.configurations(
            self.model, self.prompt_tokens, (self.batch_before, self.batch_after),
            (self.tokens_before, self.tokens_after),
        )  # fmt: skip

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Their traces."""
        return trace_all(self.steps, self.processes)


TABLES = {
    "configurations": lambda s: steps.configurations_table(s.steps, s.traces),
    "categories": lambda s: categories_table(s.traces),
    "timelines": lambda s: timelines_table({name: trace(s.steps[name], all_layers=True) for name in TIMELINES}),
    "largest": lambda s: steps.largest_table(s.traces["loop"]),
}
TIMED = {"seconds": lambda s: pd.DataFrame(dict(configuration=name, seconds=t.seconds) for name, t in s.traces.items())}
