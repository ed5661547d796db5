"""Training runs with and without scored text, on the bench of `grade.experiments.reward_runs`.

Methods that read texts have one run for each source: N windows of reviews that no evaluation sees, each a prompt and a
completion in the policy's tokens, or ``reference:N``, completions that the reference samples once.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from grade.experiments.measured import Size
from grade.experiments.reward_runs import FIGURES, NAMES, Grid, Method, Rewards, grid_runs
from grade.experiments.rewards import OWN, Models, source_values
from grade.experiments.text_quality import outside, qualities
from grade.experiments.training_runs import Run
from grade.training.evaluate import Evaluation

READING = ("auto_texts", "offline")
"""Methods that read texts."""
SHOWN = 6
"""Completions that are kept as text, of the first seed, before and after training."""


class TextGrid(Grid):
    """Training runs: every method, with every source of texts that it can read."""

    sources: list[str] = Field(["4096"], min_length=1)  # windows of reviews, N, or reference:N
    new_tokens: Size | None = None  # T, where it differs
    own: dict[Method, dict[str, Any]] = {}  # settings of a method, with the names of grade train


def text_runs(models: Models, subject: str, grid: TextGrid, rates: Mapping[str, float]) -> list[Run]:
    """All runs of a grid."""
    models, runs = models.model_copy(update={"new_tokens": grid.new_tokens or models.new_tokens}), []
    for run in grid_runs(models, grid, rates):
        method = run.names["method"]
        own = grid.own.get(method, {})
        for source in grid.sources if method in READING else [OWN]:
            values = run.values | source_values(models, source) | own
            names = {"subject": subject, **run.names, "source": source, "new_tokens": models.new_tokens}
            names["completions"] = values["per_device_train_batch_size"]
            names["learning_rate"] = values["learning_rate"]
            runs.append(replace(run, names=names, values=values))
    return runs


class TextBench(Rewards):
    """What completions are like besides: an outside judge, diversity, length, some of the text."""

    names: ClassVar[tuple[str, ...]] = ("subject", *NAMES, "source", "new_tokens")  # subject: the grid
    columns: ClassVar[tuple[str, ...]] = (*FIGURES, "kl_stderr", "outside", "distinct", "length", "shown")

    def evaluated(self, run: Run, row: Mapping[str, Any], evaluation: Evaluation) -> dict[str, Any]:
        """KL's error, what the text is like, some of the text."""
        shown = None
        if row["step"] in (0, run.values["max_steps"]) and run.values["seed"] == 0:
            some = evaluation.first(SHOWN)
            rows = zip(some.prompts, some.completions, some.reward.tolist(), outside(some.completions), strict=True)
            shown = json.dumps([[p, c, round(r, 3), round(float(o), 3)] for p, c, r, o in rows])
        return qualities(evaluation.completions) | {
            "kl_stderr": (row.get("val/kl_stderr") or math.nan) * run.values["max_completion_length"],
            "shown": shown,
        }  # fmt: skip
