"""The tables of the experiment with the probe, and the settings that they depend on.

Predicted against true change of entropy on a real policy, over step sizes and training steps; and what the memory
proposals of document 003 would change (`grade.experiments.probe.measure.proposals`).
"""

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from pydantic import Field

from grade.config import Config
from grade.entropy.change import prefix_change
from grade.entropy.probe import EntropyProbe, ProbeReport
from grade.entropy.run import ProbeRunConfig, make_optimizer, probe_adapter
from grade.entropy.samples import (
    directional,
    draw,
    entropy_coefficients,
    prompt_gradients,
    scores_at,
    sequence_logps,
)
from grade.errors import InputError
from grade.experiments.measured import Positive, Several, Size
from grade.experiments.probe.measure import proposals
from grade.experiments.setting import TRAINED_RUN, load_policy, text_sequences
from grade.gradients.objective import Objective
from grade.memory.tables import categories_table, timelines_table
from grade.memory.trace import Trace, trace
from grade.models.backbone import Backbone
from grade.models.prompts import decode, encode_prompts
from grade.results import progress
from grade.stats import Estimate
from grade.training.checkpoint import OPTIMIZER_FILE
from grade.training.toy import toy_task

_TIMELINES = ("chunked", "streamed")
"""Ways whose live bytes are shown over a step."""
_MEASURED = 2, 4
"""B and G of the completions on which the proposals are compared."""
_TOY_PROBE = ProbeRunConfig.parse({
    "learning_rate": 1e-2, "batch_config": {"B": 4, "G": 4}, "generation": {"max_new_tokens": 6},
    "memory_config": {"profile_memory": True}, "probe_config": {"multiples": [0.1, 1.0]},
})  # fmt: skip


class Settings(Config):
    """Sizes of the experiment with the probe."""

    model: str = "tiny"  # shape of the traced model; the document's is qwen2.5-1.5b
    prompts: Size = 2  # B; 8 in the document's validation
    group: Several = 3  # completions of a prompt, G
    prompt_tokens: Size = 8  # P
    new_tokens: Size = 8  # T
    microbatch: Size = 1  # completions in a forward pass
    large_prompts: Size = 3  # B of the larger of two sizes at the same microbatch
    large_group: Several = 4  # G of the larger
    backbone_dir: str = ""  # folder of the model that runs; empty: the toy task
    reviews_dir: str = ""  # folder of the review splits
    reward_dir: str = ""  # folder of the reward model
    runs_dir: str = ""  # folder of training runs
    probe: ProbeRunConfig = _TOY_PROBE  # the probe's settings; its three folders are those above
    narrow_prompts: Several = 2  # prompts on which bfloat16 is compared with float32
    # step sizes of that comparison, times the learning rate
    narrow_multiples: list[Positive] = Field([0.1, 1.0], min_length=1)
    measured_prompt_tokens: Size = 4  # P of the completions on which the proposals are compared
    measured_new_tokens: Size = 6  # T

    @cached_property
    def adapters(self) -> dict[int, Path | None]:
        """The run's adapters by training step: none (a new one) at step 0, its checkpoints, the trained one."""
        run = Path(self.runs_dir, TRAINED_RUN)
        if not (run / "adapter" / OPTIMIZER_FILE).is_file():
            raise InputError("runs_dir", str(run), f"a run with adapter/{OPTIMIZER_FILE}, as written by training")
        adapters: dict[int, Path | None] = {0: None}
        adapters |= {int(folder.name.removeprefix("step-")): folder for folder in (run / "checkpoints").glob("step-*")}
        state = torch.load(run / "adapter" / OPTIMIZER_FILE, weights_only=True)["state"]
        adapters[int(state[0]["step"])] = run / "adapter"
        return dict(sorted(adapters.items()))

    @cached_property
    def reports(self) -> dict[int, ProbeReport]:
        """Probes by training step; one of the toy task, where there is no trained run."""
        if not self.backbone_dir:
            task = toy_task()
            texts = task.validation_prompts[: 2 * self.probe.batch_config.B]
            optimizer = make_optimizer(self.probe, task.backbone, None)
            probe = EntropyProbe(task.backbone, optimizer, self.probe)
            reward = partial(Objective(task.reward_model).score, task.backbone)
            return {0: probe.run(encode_prompts(task.backbone.tokenizer, texts, 8), reward)}
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
            return toy_task(dtype=dtype).backbone
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
        others = {name: config for name, config in self.steps.items() if name not in _TIMELINES}
        traces = {name: trace(config) for name, config in others.items()}
        traces |= {name: trace(self.steps[name], all_layers=True) for name in progress(_TIMELINES, "traces")}
        return {name: traces[name] for name in self.steps}


def _predictions(s: Settings) -> pd.DataFrame:
    """Every probe's figures but seconds and bytes: one row per training step."""
    rows = [{"step": step} | {k: v for k, v in report.figures.items() if "/" not in k}
            for step, report in s.reports.items()]  # fmt: skip
    return pd.DataFrame(rows)


def _sweep(s: Settings) -> pd.DataFrame:
    """Every step size of every probe."""
    rows = [{"step": step, "learning_rate": s.probe.learning_rate * row["multiple"], **row}
            for step, report in s.reports.items() for row in report.sweep]  # fmt: skip
    return pd.DataFrame(rows)


def _layers(s: Settings) -> pd.DataFrame:
    """Every prediction by layer (-1: modules outside the layers): parts in nats that sum to it."""
    rows = [(step, *part) for step, report in s.reports.items() for part in report.layers().items()]
    return pd.DataFrame(rows, columns=["step", "layer", "part"])


def _sequences(s: Settings) -> pd.DataFrame:
    """Every prediction by prompt and completion: parts in nats whose mean it is."""
    rows = [(step, n, g, part) for step, report in s.reports.items()
            for n, row in enumerate(report.sequences.tolist()) for g, part in enumerate(row)]  # fmt: skip
    return pd.DataFrame(rows, columns=["step", "prompt", "completion", "part"])


def _extremes(s: Settings) -> pd.DataFrame:
    """The text of the two completions with the lowest parts (nats) and of the two with the highest, in that order."""
    parts, samples, tokenizer = s.last.sequences.flatten(), s.last.samples, s.full_policy.tokenizer
    rows = []
    for i in parts.argsort()[[0, 1, -2, -1]].tolist():
        n, g = divmod(i, samples.ids.shape[1])
        prompt = decode(tokenizer, samples.prompts.ids[n], samples.prompts.mask[n])
        rows.append((float(parts[i]), prompt, decode(tokenizer, samples.ids[n, g], samples.mask[n, g])))
    return pd.DataFrame(rows, columns=["part", "prompt", "completion"])


def _precision(s: Settings) -> pd.DataFrame:
    """True and predicted change of entropy by the last probe's step on some of its samples, in two types."""
    samples, step, rows = s.last.samples[: s.narrow_prompts], s.last.step, []
    predicted = float(directional(s.full_policy, samples, step).per_sequence().mean())
    for name, policy in (("float32", s.full_policy), ("bfloat16", s.policy("bfloat16"))):
        old = scores_at(policy, samples)
        for multiple in s.narrow_multiples:
            new = scores_at(policy, samples, step, multiple)
            change = Estimate.of(prefix_change(old, new).mean(1))
            rows.append((name, multiple, multiple * predicted, change.mean, change.stderr))
    return pd.DataFrame(rows, columns=["dtype", "multiple", "predicted", "delta_h", "delta_h_stderr"])


def _by_phase(s: Settings, quantity: str) -> pd.DataFrame:
    """A quantity of each phase of the last probe; bytes are above those that were live before it."""
    rows = [(key.removeprefix(f"{quantity}/"), value) for key, value in s.last.figures.items()
            if key.startswith(f"{quantity}/")]  # fmt: skip
    return pd.DataFrame(rows, columns=["phase", quantity])


def _traces(s: Settings) -> pd.DataFrame:
    """Memory of the gradient path: name, peak and step_bytes (beyond what is always there)."""
    rows = [(name, t.peak, t.step_bytes) for name, t in s.traced.items()]
    return pd.DataFrame(rows, columns=["name", "peak", "step_bytes"])


def _effects(s: Settings) -> dict[str, Any]:
    """What the document's proposals do, on completions that a model samples here; see `measure.proposals`."""
    backbone, texts = load_policy(s.backbone_dir, f"{s.runs_dir}/{TRAINED_RUN}/adapter", s.reviews_dir)
    prompts, _ = text_sequences(backbone, texts, _MEASURED[0], s.measured_prompt_tokens, 1)
    samples = draw(backbone, prompts, _MEASURED[1], s.measured_new_tokens, torch.Generator().manual_seed(0))
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
    "sweep": _sweep,
    "layers": _layers,
    "sequences": _sequences,
    "extremes": _extremes,
    "precision": _precision,
    "phases": lambda s: _by_phase(s, "peak_bytes"),
    "traces": _traces,
    "categories": lambda s: categories_table({s.labels[name]: t for name, t in s.traced.items()}),
    "timelines": lambda s: timelines_table({s.labels[name]: s.traced[name] for name in _TIMELINES}),
    "effects": _effects,
}
TIMED = {"phase_seconds": lambda s: _by_phase(s, "seconds")}
