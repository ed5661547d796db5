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
from grade.experiments.measured import Measurements as Base
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


class Measurements(Base[Settings]):
    """A probe of a policy in training, and document 003's proposals for its memory."""

    Settings = Settings
    tables = ("predictions", "report", "sweep", "layers", "sequences", "extremes", "precision", "phases", "traces",
              "categories", "timelines", "effects")  # fmt: skip
    timed = ("phase_seconds",)

    @cached_property
    def adapters(self) -> dict[int, Path | None]:
        """Adapters of the trained run by training step; see `study.checkpoints`."""
        return study.checkpoints(Path(self.settings.runs_dir) / self.settings.trained_run)

    @cached_property
    def toy(self) -> tuple[ProbeReport, Backbone]:
        """The probe of the toy task, and its policy."""
        return study.toy_report(self.settings.probe)

    @cached_property
    def reports(self) -> dict[int, ProbeReport]:
        """Probes by training step."""
        s = self.settings
        if not s.backbone_dir:
            return {0: self.toy[0]}
        places = {"backbone": s.backbone_dir, "reward": s.reward_dir, "reviews": s.reviews_dir}
        config = s.probe.model_copy(update=places)
        adapters = progress(self.adapters.items(), "probes")
        return {step: probe_adapter(config, folder) for step, folder in adapters}

    @property
    def last(self) -> ProbeReport:
        """The probe of the last training step."""
        return self.reports[max(self.reports)]

    @cached_property
    def policy(self) -> Backbone:
        """The policy of the last training step, in float32."""
        return self._policy("float32") if self.settings.backbone_dir else self.toy[1]

    def _policy(self, dtype: str) -> Backbone:
        if not self.settings.backbone_dir:
            return study.toy_report(self.settings.probe, dtype)[1]
        return Backbone.load(self.settings.backbone_dir, dtype, None, self.adapters[max(self.adapters)])

    def predictions(self) -> pd.DataFrame:
        """Every probe's figures but seconds and bytes: one row per training step."""
        rows = [{"step": step} | {k: v for k, v in report.figures.items() if "/" not in k}
                for step, report in self.reports.items()]  # fmt: skip
        return pd.DataFrame(rows)

    def report(self) -> dict[str, Any]:
        """The last probe's summary: step and text."""
        return {"step": max(self.reports), "text": self.last.as_text()}

    def sweep(self) -> pd.DataFrame:
        """Predicted and true change by training step and step size; see `study.sweep_table`."""
        return study.sweep_table(self.reports, self.settings.probe.learning_rate)

    def layers(self) -> pd.DataFrame:
        """Predicted change by layer; see `study.parts_tables`."""
        return study.parts_tables(self.reports)[0]

    def sequences(self) -> pd.DataFrame:
        """Predicted change by completion; see `study.parts_tables`."""
        return study.parts_tables(self.reports)[1]

    def extremes(self) -> pd.DataFrame:
        """The last probe's completions with the lowest and highest parts; see `study.extremes_table`."""
        return study.extremes_table(self.last, self.policy)

    def precision(self) -> pd.DataFrame:
        """The last probe's step in float32 and bfloat16; see `study.precision_table`."""
        s = self.settings
        policies = {"float32": self.policy, "bfloat16": self._policy("bfloat16")}
        samples = self.last.samples.of_prompts(slice(s.narrow_prompts))
        return study.precision_table(policies, samples, self.last.step, s.narrow_multiples)

    def phases(self) -> pd.DataFrame:
        """Peak of live bytes in each phase of the last probe, above those before it: phase, peak_bytes."""
        return self._by_phase("peak_bytes")

    def phase_seconds(self) -> pd.DataFrame:
        """Wall time of each phase of the last probe: phase, seconds."""
        return self._by_phase("seconds")

    def _by_phase(self, quantity: str) -> pd.DataFrame:
        rows = [(key.removeprefix(f"{quantity}/"), value) for key, value in self.last.figures.items()
                if key.startswith(f"{quantity}/")]  # fmt: skip
        return pd.DataFrame(rows, columns=["phase", quantity])

    @cached_property
    def steps(self) -> dict[str, proposals.ProbeStepConfig]:
        """The gradient path's configurations by name."""
        s = self.settings
        sizes = {
            "whole": (s.prompts, s.group),
            "chunked": (s.prompts, s.group),
            "streamed": (s.prompts, s.group),
            "whole, large": (s.large_prompts, s.large_group),
            "streamed, large": (s.large_prompts, s.large_group),
            "streamed, small": (2, 2),
        }
        return {
            name: proposals.ProbeStepConfig(
                model=s.model, prompt_tokens=s.prompt_tokens, max_new_tokens=s.new_tokens,
                microbatch_size=s.microbatch, gradient_checkpointing=True,
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
        traces = trace_all(others, self.settings.processes)
        traces |= {name: trace(self.steps[name], all_layers=True) for name in progress(TIMELINES, "traces")}
        return {name: traces[name] for name in self.steps}

    def traces(self) -> pd.DataFrame:
        """Memory of the gradient path: name, configuration, peak and step_bytes (beyond what is always there)."""
        rows = [(name, self.labels[name], t.peak, t.step_bytes) for name, t in self.traced.items()]
        return pd.DataFrame(rows, columns=["name", "configuration", "peak", "step_bytes"])

    def categories(self) -> pd.DataFrame:
        """Bytes at each peak by category; see `grade.experiments.traced.categories_table`."""
        return categories_table({self.labels[name]: t for name, t in self.traced.items()})

    def timelines(self) -> pd.DataFrame:
        """Live bytes of two ways over a step; see `grade.experiments.traced.timelines_table`."""
        return timelines_table({self.labels[name]: self.traced[name] for name in TIMELINES})

    def effects(self) -> dict[str, Any]:
        """What the document's proposals do, on completions that a model samples here; see `measure.proposals`."""
        s = self.settings
        adapter = str(Path(s.runs_dir) / s.trained_run / "adapter") if s.backbone_dir else ""
        backbone, texts = load_policy(s.backbone_dir, adapter, s.reviews_dir)
        prompts, _ = text_sequences(backbone, texts, s.measured_prompts, s.measured_prompt_tokens, 1)
        generator = torch.Generator().manual_seed(0)
        samples = draw(backbone, prompts, s.measured_group, s.measured_new_tokens, generator)
        coefficients = entropy_coefficients(sequence_logps(backbone, samples, s.microbatch))
        (streamed,) = prompt_gradients(backbone, samples, [coefficients], s.microbatch)
        held = proposals.held_gradient(backbone, samples)
        ids = samples.ids[:, 0]
        narrow = proposals.narrow_log_probability_error(backbone, prompts, ids)
        return {
            "streamed_grad_rel_diff": float((streamed.mean(0) - held).norm() / held.norm()),
            **{f"saved_{name}": value for name, value in proposals.saved_by_log_probabilities().items()},
            **{f"narrow_{name}": value for name, value in narrow.items()},
            "missing_mask_error": proposals.missing_mask_error(backbone, prompts, ids, s.measured_prompt_tokens),
            "buffer_error": proposals.proposed_buffer_error(),
            **{f"restore_{name}": value for name, value in proposals.restore_errors().items()},
        }
