"""The tables of the experiment on Intuitor, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.experiments.intuitor.measure import study
from grade.experiments.measured import Measurements as Base
from grade.experiments.setting import load_policy, text_sequences
from grade.experiments.traced import categories_table, shape_of, timelines_table
from grade.memory.trace import Trace, trace

PEAKS = (5, 10, 15, 20, 25, 30, 35)
"""Heights of the one logit that is raised."""


class Settings(Config):
    """Sizes of the experiment on Intuitor."""

    model: str = Field("tiny", description="shape of the traced model; the document's is qwen2.5-1.5b")
    table_batch: int = Field(4, ge=1, description="sequences of the document's table, 64")
    table_tokens: int = Field(192, ge=1, description="tokens of each, 6K")
    lengths: list[int] = Field([96], min_length=1, description="tokens of a sequence in the traced updates, 2K to 8K")
    gpus: int = Field(8, ge=1, description="GPUs that divide weights, gradients and optimizer")
    settings_prompt_tokens: int = Field(8, ge=1, description="P of the recommended settings, 2K")
    settings_new_tokens: list[int] = Field(
        [1, 2], min_length=2, max_length=2, description="T of the conservative and of the aggressive one, 1K and 2K"
    )
    budget_gb: float = Field(80.0, gt=0, description="memory of each GPU in decimal GB")
    backbone_dir: str = Field("", description="folder of the model that writes; empty: a tiny random one")
    runs_dir: str = Field("", description="folder of training runs, where an adapter of one is used")
    trained_run: str = Field("", description="the run whose adapter is used; empty: the base alone")
    reviews_dir: str = Field("", description="folder of the review splits")
    measured_prompts: int = Field(4, ge=1, description="B of the prompts that are continued")
    measured_prompt_tokens: int = Field(4, ge=1, description="P")
    measured_new_tokens: int = Field(6, ge=1, description="T")
    group: int = Field(4, ge=2, description="completions of each prompt, G")
    chunk: int = Field(16, ge=1, description="vocabulary chunk of the document's formula, 1024")
    sweep_vocab: int = Field(512, ge=2, description="V of the sweep")
    processes: int = Field(1, ge=1, description="traces that run at once")


class Measurements(Base[Settings]):
    """Intuitor's update beside PPO's, and self-certainty beside the document's formula."""

    Settings = Settings
    tables = ("formulas", "lengths", "categories", "timelines", "fits", "certainty", "scores", "sweep")

    def formulas(self) -> pd.DataFrame:
        """The document's table of sizes; see `study.memory_table`."""
        s = self.settings
        return study.memory_table(shape_of(s.model), s.table_batch, s.table_tokens)

    @cached_property
    def traces(self) -> dict[tuple[int, str], Trace]:
        """One GPU's share of each update, by length and step."""
        return study.length_traces(self.settings.model, self.settings.lengths, self.settings.gpus,
                                   self.settings.processes)  # fmt: skip

    def lengths(self) -> pd.DataFrame:
        """Peaks by length and step; see `study.length_table`."""
        return study.length_table(self.traces)

    def categories(self) -> pd.DataFrame:
        """Bytes at the peak by category, at the greatest length; see `grade.experiments.traced.categories_table`."""
        longest = max(self.settings.lengths)
        return categories_table({step: t for (tokens, step), t in self.traces.items() if tokens == longest})

    def timelines(self) -> pd.DataFrame:
        """Live bytes of Intuitor's update at the greatest length; see `grade.experiments.traced.timelines_table`.

        Of all layers, and of a GPU that divides nothing with others.
        """
        configs = study.update_configs(self.settings.model, max(self.settings.lengths))
        return timelines_table({
            step: trace(config, all_layers=True) for step, config in configs.items() if config.self_certainty
        })  # fmt: skip

    def fits(self) -> pd.DataFrame:
        """Sequences that fit a GPU in each of the document's settings; see `study.settings_fit`."""
        s = self.settings
        short, long = s.settings_new_tokens
        return study.settings_fit(s.model, s.settings_prompt_tokens, (short, long), s.gpus, round(s.budget_gb * 1e9))

    @cached_property
    def certainties(self) -> tuple[dict[str, float], pd.DataFrame]:
        """Figures of the scores, and the scores."""
        s = self.settings
        adapter = str(Path(s.runs_dir) / s.trained_run / "adapter") if s.trained_run else ""
        backbone, texts = load_policy(s.backbone_dir, adapter, s.reviews_dir)
        prompts, _ = text_sequences(backbone, texts, s.measured_prompts, s.measured_prompt_tokens, 1)
        samples = study.certainty_samples(backbone, prompts, s.measured_new_tokens, s.group)
        return study.certainty_figures(backbone, *samples, chunk=s.chunk)

    def certainty(self) -> dict[str, float]:
        """Self-certainty beside the document's formula and in narrow types; see `study.certainty_figures`."""
        return self.certainties[0]

    def scores(self) -> pd.DataFrame:
        """Both scores of each completion; see `study.certainty_figures`."""
        return self.certainties[1]

    def sweep(self) -> pd.DataFrame:
        """Both scores against the height of one logit; see `study.peak_sweep`."""
        return study.peak_sweep(self.settings.sweep_vocab, PEAKS, chunk=self.settings.chunk)
