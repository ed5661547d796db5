"""The tables of the experiment on Intuitor, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.experiments.intuitor.measure import study
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

    @cached_property
    def traces(self) -> dict[tuple[int, str], Trace]:
        """One GPU's share of each update, by length and step."""
        return study.length_traces(self.model, self.lengths, self.gpus, self.processes)

    @cached_property
    def certainties(self) -> tuple[dict[str, float], pd.DataFrame]:
        """Figures of the scores, and the scores; see `study.certainty_figures`."""
        adapter = str(Path(self.runs_dir) / self.trained_run / "adapter") if self.trained_run else ""
        backbone, texts = load_policy(self.backbone_dir, adapter, self.reviews_dir)
        prompts, _ = text_sequences(backbone, texts, self.measured_prompts, self.measured_prompt_tokens, 1)
        samples = study.certainty_samples(backbone, prompts, self.measured_new_tokens, self.group)
        return study.certainty_figures(backbone, *samples, chunk=self.chunk)


def _categories(s: Settings) -> pd.DataFrame:
    """Bytes at the peak by category, at the greatest length."""
    longest = max(s.lengths)
    return categories_table({step: t for (tokens, step), t in s.traces.items() if tokens == longest})


def _timelines(s: Settings) -> pd.DataFrame:
    """Live bytes of Intuitor's update at the greatest length, on a GPU that divides nothing with others."""
    configs = study.update_configs(s.model, max(s.lengths))
    return timelines_table(
        {step: trace(config, all_layers=True) for step, config in configs.items() if config.self_certainty}
    )


TABLES = {
    "formulas": lambda s: study.memory_table(shape_of(s.model), s.table_batch, s.table_tokens),
    "lengths": lambda s: study.length_table(s.traces),
    "categories": _categories,
    "timelines": _timelines,
    "fits": lambda s: study.settings_fit(
        s.model, s.settings_prompt_tokens, s.settings_new_tokens, s.gpus, round(s.budget_gb * 1e9)
    ),
    "certainty": lambda s: s.certainties[0],
    "scores": lambda s: s.certainties[1],
    "sweep": lambda s: study.peak_sweep(s.sweep_vocab, PEAKS, chunk=s.chunk),
}
TIMED = {}
