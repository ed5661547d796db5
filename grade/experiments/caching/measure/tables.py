"""The tables of the experiment on activation caching, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import pandas as pd
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.experiments.caching.measure import options
from grade.experiments.caching.measure.inventory import layer_inventory
from grade.experiments.caching.measure.options import OPTIONS, CachingConfig
from grade.experiments.setting import load_policy, text_sequences
from grade.experiments.traced import PolicyStepConfig, categories_table, timelines_table
from grade.memory.trace import Trace, trace, trace_all
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch

TIMELINES = ("selected", "hybrid")
"""Options whose live bytes are shown over a step: without and with checkpointed layers."""
COPY = "copy"
"""Not an option: ``selected`` with a second base."""


class Settings(Config):
    """Sizes of the experiment on activation caching."""

    model: str = Field("tiny", description="shape of the traced model; the document's is qwen2.5-coder-3b")
    batch: int = Field(2, ge=1, description="B")
    prompt_tokens: int = Field(8, ge=1, description="P; in the document prompt and completion have 512 tokens together")
    new_tokens: int = Field(8, ge=1, description="T")
    backbone_dir: str = Field("", description="folder of the model that runs; empty: a tiny random one")
    runs_dir: str = Field("", description="folder of training runs, where its adapter is")
    trained_run: str = Field("ste-0", description="the run whose adapter is used")
    reviews_dir: str = Field("", description="folder of the review splits")
    measured_batch: int = Field(2, ge=1, description="B of the steps that run")
    measured_prompt_tokens: int = Field(4, ge=1, description="P")
    measured_new_tokens: int = Field(8, ge=1, description="T")
    repeats: int = Field(1, ge=1, description="how often each option is timed; the median counts")
    processes: int = Field(1, ge=1, description="traces that run at once")

    def config(self, **options: Any) -> CachingConfig:
        """A step of the document's model, batch and length."""
        return CachingConfig(**self.sizes, **options)

    @property
    def sizes(self) -> dict[str, Any]:
        """Model, B, P and T of what is traced."""
        return dict(model=self.model, batch_size=self.batch, prompt_tokens=self.prompt_tokens,
                    max_new_tokens=self.new_tokens)  # fmt: skip

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Traces of all options, and of `COPY`."""
        configs = {option: self.config(option=option) for option in OPTIONS}
        return trace_all(configs | {COPY: self.config(option="selected", base_copies=2)}, self.processes)

    @cached_property
    def policy(self) -> tuple[Backbone, PromptBatch, Tensor]:
        """The trained policy, and text as prompts and completions."""
        adapter = f"{self.runs_dir}/{self.trained_run}/adapter" if self.backbone_dir and self.runs_dir else ""
        backbone, texts = load_policy(self.backbone_dir, adapter, self.reviews_dir)
        sizes = self.measured_batch, self.measured_prompt_tokens, self.measured_new_tokens
        return backbone, *text_sequences(backbone, texts, *sizes)

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The options, run; see `options.compare_options`."""
        return options.compare_options(*self.policy, repeats=self.repeats)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """The policy's activations against the base's; see `options.layer_differences`."""
        return options.layer_differences(*self.policy)


def _layer(s: Settings) -> pd.DataFrame:
    """What a middle layer keeps for backward in a pass with all logits and no reference; shapes as text."""
    tables = []
    for attention in ("sdpa", "eager"):
        config = PolicyStepConfig(**s.sizes, attention=attention, logits="all", reference=False)
        tables.append(layer_inventory(config).assign(attention=attention))
    table = pd.concat(tables, ignore_index=True)
    return table.assign(shape=[" x ".join(map(str, shape)) for shape in table["shape"]])


TABLES = {
    "layer": _layer,
    "peaks": lambda s: pd.DataFrame(
        dict(option=option, peak_bytes=t.peak, step_bytes=t.step_bytes) for option, t in s.traces.items()
    ),
    "categories": lambda s: categories_table({option: s.traces[option] for option in OPTIONS}),
    "timelines": lambda s: timelines_table(
        {option: trace(s.config(option=option), all_layers=True) for option in TIMELINES}
    ),
    "agreement": lambda s: s.compared.drop(columns="seconds"),
    "layer_differences": lambda s: s.differences,
    "policy": lambda s: {**options.reference_that_keeps_its_adapter(*s.policy), **s.differences.attrs},
}
TIMED = {"seconds": lambda s: s.compared[["option", "seconds"]]}
