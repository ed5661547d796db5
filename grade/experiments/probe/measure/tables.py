"""The tables of the experiment with the probe, and the settings that they depend on."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import Field

from grade.config import Config
from grade.entropy.probe import ProbeReport
from grade.entropy.run import ProbeRunConfig, probe_adapter
from grade.entropy.samples import draw, entropy_coefficients, prompt_gradients, sequence_logps
from grade.experiments.measured import progress
from grade.experiments.probe.measure import proposals, study
from grade.experiments.setting import load_policy, text_sequences
from grade.experiments.traced import categories_table, timelines_table
from grade.memory.trace import Trace, trace, trace_all
from grade.models.backbone import Backbone

TIMELINES = ("chunked", "streamed")
"""Ways whose live bytes are shown over a step."""

_TOY_PROBE = ProbeRunConfig.parse({
    "learning_rate": 1e-2, "batch_config": {"B": 4, "G": 4}, "generation": {"max_new_tokens": 6},
    "memory_config": {"profile_memory": True}, "probe_config": {"multiples": [0.1, 1.0]},
})  # fmt: skip


class Settings(Config):
    """Sizes of the experiment with the probe."""

    model: str = Field("tiny", description="shape of the traced model; the document's is qwen2.5-1.5b")
    prompts: int = Field(2, ge=1, description="B; 8 in the document's validation")
    group: int = Field(3, ge=2, description="completions of a prompt, G")
    prompt_tokens: int = Field(8, ge=1, description="P")
    new_tokens: int = Field(8, ge=1, description="T")
    microbatch: int = Field(1, ge=1, description="completions in a forward pass")
    large_prompts: int = Field(3, ge=1, description="B of the larger of two sizes at the same microbatch")
    large_group: int = Field(4, ge=2, description="G of the larger")
    backbone_dir: str = Field("", description="folder of the model that runs; empty: the toy task")
    reviews_dir: str = Field("", description="folder of the review splits")
    reward_dir: str = Field("", description="folder of the reward model")
    runs_dir: str = Field("", description="folder of training runs")
    trained_run: str = Field("ste-0", description="the run that is probed; it kept its optimizer's state")
    probe: ProbeRunConfig = Field(_TOY_PROBE, description="the probe's settings; its three folders are those above")
    narrow_prompts: int = Field(2, ge=2, description="prompts on which bfloat16 is compared with float32")
    narrow_multiples: list[float] = Field(
        [0.1, 1.0], min_length=1, description="step sizes of that comparison, times the learning rate"
    )
    measured_prompts: int = Field(2, ge=1, description="B of the completions on which the proposals are compared")
    measured_prompt_tokens: int = Field(4, ge=1, description="P")
    measured_new_tokens: int = Field(6, ge=1, description="T")
    measured_group: int = Field(4, ge=2, description="G")
    processes: int = Field(1, ge=1, description="traces that run at once")

    @cached_property
    def adapters(self) -> dict[int, Path | None]:
        """Adapters of the trained run by training step; see `study.checkpoints`."""
        return study.checkpoints(Path(self.runs_dir) / self.trained_run)

    @cached_property
    def toy(self) -> tuple[ProbeReport, Backbone]:
        """The probe of the toy task, and its policy."""
        return study.toy_report(self.probe)

    @cached_property
    def reports(self) -> dict[int, ProbeReport]:
        """Probes by training step."""
        if not self.backbone_dir:
            return {0: self.toy[0]}
        places = {"backbone": self.backbone_dir, "reward": self.reward_dir, "reviews": self.reviews_dir}
        config = self.probe.model_copy(update=places)
        return {step: probe_adapter(config, folder) for step, folder in progress(self.adapters.items(), "probes")}

    @property
    def last(self) -> ProbeReport:
        """The probe of the last training step."""
        return self.reports[max(self.reports)]

    def policy(self, dtype: str) -> Backbone:
        """The policy of the last training step."""
        if not self.backbone_dir:
            return self.toy[1] if dtype == "float32" else study.toy_report(self.probe, dtype)[1]
        return Backbone.load(self.backbone_dir, dtype, None, self.adapters[max(self.adapters)])

    @cached_property
    def full_policy(self) -> Backbone:
        """The same in float32."""
        return self.policy("float32")

    @cached_property
    def steps(self) -> dict[str, proposals.ProbeStepConfig]:
        """The gradient path's configurations by name."""
        sizes, large = (self.prompts, self.group), (self.large_prompts, self.large_group)
        sizes = {"whole": sizes, "chunked": sizes, "streamed": sizes, "whole, large": large, "streamed, large": large,
                 "streamed, small": (2, 2)}  # fmt: skip
        return {
            name: proposals.ProbeStepConfig(
                model=self.model, prompt_tokens=self.prompt_tokens, max_new_tokens=self.new_tokens,
                microbatch_size=self.microbatch, gradient_checkpointing=True,
                batch_size=batch, num_generations=group, way=name.split(",")[0],
            )
            for name, (batch, group) in sizes.items()
        }  # fmt: skip

    @cached_property
    def labels(self) -> dict[str, str]:
        """Names of the configurations with their sizes."""
        return {name: f"{name}: B={c.batch_size}, G={c.num_generations}" for name, c in self.steps.items()}

    @cached_property
    def traced(self) -> dict[str, Trace]:
        """Traces of the gradient path by name; those whose timelines are shown are of all layers."""
        others = {name: config for name, config in self.steps.items() if name not in TIMELINES}
        traces = trace_all(others, self.processes)
        traces |= {name: trace(self.steps[name], all_layers=True) for name in progress(TIMELINES, "traces")}
        return {name: traces[name] for name in self.steps}


def _predictions(s: Settings) -> pd.DataFrame:
    """Every probe's figures but seconds and bytes: one row per training step."""
    rows = [{"step": step} | {k: v for k, v in report.figures.items() if "/" not in k}
            for step, report in s.reports.items()]  # fmt: skip
    return pd.DataFrame(rows)


def _precision(s: Settings) -> pd.DataFrame:
    """The last probe's step in float32 and bfloat16; see `study.precision_table`."""
    policies = {"float32": s.full_policy, "bfloat16": s.policy("bfloat16")}
    samples = s.last.samples.of_prompts(slice(s.narrow_prompts))
    return study.precision_table(policies, samples, s.last.step, s.narrow_multiples)


def _by_phase(s: Settings, quantity: str) -> pd.DataFrame:
    """A quantity of each phase of the last probe; bytes are above those that were live before it."""
    rows = [(key.removeprefix(f"{quantity}/"), value) for key, value in s.last.figures.items()
            if key.startswith(f"{quantity}/")]  # fmt: skip
    return pd.DataFrame(rows, columns=["phase", quantity])


def _traces(s: Settings) -> pd.DataFrame:
    """Memory of the gradient path: name, configuration, peak and step_bytes (beyond what is always there)."""
    rows = [(name, s.labels[name], t.peak, t.step_bytes) for name, t in s.traced.items()]
    return pd.DataFrame(rows, columns=["name", "configuration", "peak", "step_bytes"])


def _effects(s: Settings) -> dict[str, Any]:
    """What the document's proposals do, on completions that a model samples here; see `measure.proposals`."""
    adapter = str(Path(s.runs_dir) / s.trained_run / "adapter") if s.backbone_dir else ""
    backbone, texts = load_policy(s.backbone_dir, adapter, s.reviews_dir)
    prompts, _ = text_sequences(backbone, texts, s.measured_prompts, s.measured_prompt_tokens, 1)
    samples = draw(backbone, prompts, s.measured_group, s.measured_new_tokens, torch.Generator().manual_seed(0))
    coefficients = entropy_coefficients(sequence_logps(backbone, samples, s.microbatch))
    streamed = prompt_gradients(backbone, samples, coefficients, s.microbatch)
    held, ids = proposals.held_gradient(backbone, samples), samples.ids[:, 0]
    return {
        "streamed_grad_rel_diff": float((streamed.mean(0) - held).norm() / held.norm()),
        **{f"saved_{name}": value for name, value in proposals.saved_by_log_probabilities().items()},
        **{f"narrow_{k}": v for k, v in proposals.narrow_log_probability_error(backbone, prompts, ids).items()},
        "missing_mask_error": proposals.missing_mask_error(backbone, prompts, ids, s.measured_prompt_tokens),
        "buffer_error": proposals.proposed_buffer_error(),
        **{f"restore_{name}": value for name, value in proposals.restore_errors().items()},
    }


TABLES = {
    "predictions": _predictions,
    "report": lambda s: {"step": max(s.reports), "text": s.last.as_text()},
    "sweep": lambda s: study.sweep_table(s.reports, s.probe.learning_rate),
    "layers": lambda s: study.parts_tables(s.reports)[0],
    "sequences": lambda s: study.parts_tables(s.reports)[1],
    "extremes": lambda s: study.extremes_table(s.last, s.full_policy),
    "precision": _precision,
    "phases": lambda s: _by_phase(s, "peak_bytes"),
    "traces": _traces,
    "categories": lambda s: categories_table({s.labels[name]: t for name, t in s.traced.items()}),
    "timelines": lambda s: timelines_table({s.labels[name]: s.traced[name] for name in TIMELINES}),
    "effects": _effects,
}
TIMED = {"phase_seconds": lambda s: _by_phase(s, "seconds")}
