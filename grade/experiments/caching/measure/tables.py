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
from grade.experiments.measured import Measurements as Base
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


class Measurements(Base[Settings]):
    """One layer and document 002's options, traced on its model and run on one that fits here."""

    Settings = Settings
    tables = ("layer", "peaks", "categories", "timelines", "agreement", "layer_differences", "policy")
    timed = ("seconds",)

    @property
    def _sizes(self) -> dict[str, Any]:
        s = self.settings
        return dict(model=s.model, batch_size=s.batch, prompt_tokens=s.prompt_tokens, max_new_tokens=s.new_tokens)

    def layer(self) -> pd.DataFrame:
        """What a middle layer keeps for backward; see `grade.experiments.caching.measure.inventory.layer_inventory`.

        A forward pass with gradient, all logits, no reference. Column also attention (sdpa or eager); shapes as text.
        """
        tables = []
        for attention in ("sdpa", "eager"):
            config = PolicyStepConfig(**self._sizes, attention=attention, logits="all", reference=False)
            tables.append(layer_inventory(config).assign(attention=attention))
        table = pd.concat(tables, ignore_index=True)
        return table.assign(shape=[" x ".join(map(str, shape)) for shape in table["shape"]])

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Traces of all options, and of `COPY`."""
        configs = {option: CachingConfig(**self._sizes, option=option) for option in OPTIONS}
        configs[COPY] = CachingConfig(**self._sizes, option="selected", base_copies=2)
        return trace_all(configs, self.settings.processes)

    def peaks(self) -> pd.DataFrame:
        """Peak of each option's step, and of `COPY`: columns option, peak_bytes, and step_bytes as in `Trace`."""
        return pd.DataFrame(
            dict(option=option, peak_bytes=t.peak, step_bytes=t.step_bytes) for option, t in self.traces.items()
        )

    def categories(self) -> pd.DataFrame:
        """Bytes at the peak of each option by category; see `grade.experiments.traced.categories_table`."""
        return categories_table({option: self.traces[option] for option in OPTIONS})

    def timelines(self) -> pd.DataFrame:
        """Live bytes over a step, of all layers, for `TIMELINES`; see `grade.experiments.traced.timelines_table`."""
        configs = {option: CachingConfig(**self._sizes, option=option) for option in TIMELINES}
        return timelines_table({option: trace(config, all_layers=True) for option, config in configs.items()})

    @cached_property
    def _policy(self) -> tuple[Backbone, PromptBatch, Tensor]:
        """The trained policy, and text as prompts and completions."""
        s = self.settings
        adapter = f"{s.runs_dir}/{s.trained_run}/adapter" if s.backbone_dir and s.runs_dir else ""
        backbone, texts = load_policy(s.backbone_dir, adapter, s.reviews_dir)
        prompts, ids = text_sequences(
            backbone, texts, s.measured_batch, s.measured_prompt_tokens, s.measured_new_tokens
        )
        return backbone, prompts, ids

    @cached_property
    def _compared(self) -> pd.DataFrame:
        return options.compare_options(*self._policy, repeats=self.settings.repeats)

    def agreement(self) -> pd.DataFrame:
        """The options, run: peak bytes and agreement with ``selected``; see `options.compare_options`."""
        return self._compared.drop(columns="seconds")

    def layer_differences(self) -> pd.DataFrame:
        """How far the policy's activations are from the base's; see `options.layer_differences`."""
        return self._differences

    @cached_property
    def _differences(self) -> pd.DataFrame:
        return options.layer_differences(*self._policy)

    def policy(self) -> dict[str, float]:
        """KL of the policy, see `options.reference_that_keeps_its_adapter`, and what dropout changes in it.

        ``dropout``: relative difference of the last layer's activations between train and eval mode.
        """
        return {**options.reference_that_keeps_its_adapter(*self._policy), **self._differences.attrs}

    def seconds(self) -> pd.DataFrame:
        """Median seconds of each option's step: columns option and seconds."""
        return self._compared[["option", "seconds"]]
