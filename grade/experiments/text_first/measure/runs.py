"""Training runs with and without scored text, on the bench of `grade.experiments.reward_runs`.

Methods that read texts have one run for each source: N windows of reviews that no evaluation sees, each a prompt and a
completion in the policy's tokens, or ``reference:N``, completions that the reference samples once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from grade.experiments.measured import Size
from grade.experiments.reward_runs import FIGURES, Grid, Method, Rewards, grid_runs
from grade.experiments.reward_runs import NAMES as RUN_NAMES
from grade.experiments.rewards import OWN, Models, source_values
from grade.experiments.sums import LORA
from grade.experiments.text_quality import distinct_n, outside
from grade.experiments.training_runs import Run
from grade.models.adapter import LoraSettings
from grade.training.evaluate import Evaluation

READING = ("auto_texts", "offline")
"""Methods that read texts."""
SHOWN = 6
"""Completions that are kept as text, of the first seed, before and after training."""
NAMES = ("subject", *RUN_NAMES, "source", "new_tokens")
"""Columns that name a run; ``subject`` is its grid."""


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
            names = {"subject": subject, **run.names, "source": source, "new_tokens": models.new_tokens}
            names["completions"] = own.get("per_device_train_batch_size", grid.completions)
            names["learning_rate"] = own.get("learning_rate", names["learning_rate"])
            runs.append(replace(run, names=names, values=run.values | source_values(models, source) | own))
    return runs


class TextBench(Rewards):
    """What completions are like besides: an outside judge, diversity, length, some of the text."""

    columns: ClassVar[tuple[str, ...]] = (
        *FIGURES, "kl_stderr", "outside", "distinct", "length", "substitutions", "shown"
    )  # fmt: skip

    def adapter(self, policy: str) -> LoraSettings:
        """The adapter of a policy's runs."""
        return LORA if policy == "sums" else super().adapter(policy)

    def evaluated(self, run: Run, row: Mapping[str, Any], evaluation: Evaluation) -> dict[str, Any]:
        """KL's error, mean sentiment, distinct bigrams, mean words, one-token changes so far, some texts."""
        texts, judged = evaluation.completions, outside(evaluation.completions)
        last = row["step"] in (0, run.values["max_steps"]) and run.values["seed"] == 0
        shown = zip(evaluation.prompts, texts, evaluation.reward.tolist(), judged.tolist(), strict=True)
        return super().evaluated(run, row, evaluation) | {
            "kl_stderr": (row.get("val/kl_stderr") or math.nan) * run.values["max_completion_length"],
            "outside": judged.mean(),
            "distinct": distinct_n(texts, 2),
            "length": sum(len(text.split()) for text in texts) / len(texts),
            "substitutions": row.get("train/distilled/substitutions", 0),
            "shown": json.dumps([[p, c, round(r, 3), round(o, 3)] for p, c, r, o in shown][:SHOWN]) if last else None,
        }
