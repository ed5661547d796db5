"""Figures of the experiment with the probe, from its tables."""

from __future__ import annotations

from grade.experiments.measured import Tables, figures_of
from grade.experiments.probe.measure.tables import Settings

SWEEP = ("delta_h1_forward", "delta_h1_forward_stderr", "delta_h", "delta_h_stderr", "delta_h_prefix",
         "delta_h_prefix_stderr", "linearity_error", "linearity_error_stderr", "ess_share")  # fmt: skip
"""Columns of the sweep that are published."""
_PREDICTIONS = ("delta_h1", "delta_h1_stderr", "delta_h1_momentum", "delta_h1_gradient", "entropy", "entropy_per_token")


def metrics(tables: Tables, settings: Settings) -> dict[str, float | int | str | None]:
    """``probe/*`` on the document's proposals, peaks in decimal GB; ``study/*`` on a policy, nats per completion."""
    sweep, predictions, traces, phases = (tables[name] for name in ("sweep", "predictions", "traces", "phases"))
    traces = traces.assign(key=traces.name.str.replace(", ", "_"), peak_gb=traces.peak / 1e9,
                           step_gb=traces.step_bytes / 1e9)  # fmt: skip
    step, last = traces.set_index("name").step_bytes, predictions.iloc[-1]
    agrees = (sweep.delta_h > 0) == (sweep.delta_h1_forward > 0)
    known = sweep.delta_h.abs() > 2 * sweep.delta_h_stderr  # the true change is known to differ from 0
    return {
        **{f"probe/{name}": value for name, value in tables["effects"].items()},
        **figures_of(traces, "probe/traced_{key}", {"_peak_gb": "peak_gb", "_step_gb": "step_gb"}),
        "probe/large_over_small": step["streamed, large"] / step["streamed, small"],
        "probe/whole_over_streamed": step["whole, large"] / step["streamed, large"],
        **figures_of(sweep, "study/step{step}/x{multiple:g}", SWEEP),
        **figures_of(predictions, "study/step{step}", _PREDICTIONS),
        **figures_of(tables["precision"], "study/{dtype}/x{multiple:g}", ["delta_h"]),
        **figures_of(phases.assign(phase=phases.phase.str.replace(" ", "_")), "study/peak_bytes/{phase}",
                     {"": "peak_bytes"}),
        "study/sign_agrees_all": float(agrees.mean()), "study/sign_all_n": len(sweep),
        "study/sign_agrees": float(agrees[known].mean()) if known.any() else None, "study/sign_n": int(known.sum()),
        "study/samples": int(last.samples), "study/prompts": int(last.prompts),
        "probe/model": settings.model, "study/learning_rate": settings.probe.learning_rate,
    }  # fmt: skip


def timed_metrics(tables: Tables) -> dict[str, float]:
    """Seconds of each phase of the last probe."""
    return {f"study/seconds/{row.phase.replace(' ', '_')}": row.seconds for row in tables["phase_seconds"].itertuples()}
