"""Figures of the experiment with the probe, from its tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grade.experiments.measured import Tables

if TYPE_CHECKING:
    from grade.experiments.probe.measure.tables import Settings

SWEEP = ("delta_h1_forward", "delta_h1_forward_stderr", "delta_h", "delta_h_stderr", "delta_h_prefix",
         "delta_h_prefix_stderr", "linearity_error", "linearity_error_stderr", "ess_share")  # fmt: skip
"""Columns of the sweep that are published."""

PREDICTIONS = ("delta_h1", "delta_h1_stderr", "delta_h1_momentum", "delta_h1_gradient", "entropy", "entropy_per_token")


def metrics(tables: Tables, settings: Settings) -> dict[str, float | int | str | None]:
    """Every figure of the experiment that is no time.

    Names to values: ``probe/*`` on the document's proposals, peaks in decimal GB; ``study/*`` on the probe of a
    policy, entropies in nats per completion.
    """
    return _proposals(tables) | _study(tables) | {
        "probe/model": settings.model, "study/learning_rate": settings.probe.learning_rate,
    }  # fmt: skip


def timed_metrics(tables: Tables) -> dict[str, float]:
    """Seconds of each phase of the last probe."""
    return {f"study/seconds/{row.phase.replace(' ', '_')}": row.seconds for row in tables["phase_seconds"].itertuples()}


def _proposals(tables: Tables) -> dict[str, float | str]:
    figures = {f"probe/{name}": value for name, value in tables["effects"].items()}
    for row in tables["traces"].itertuples():
        name = row.name.replace(", ", "_")
        figures[f"probe/traced_{name}_peak_gb"] = row.peak / 1e9
        figures[f"probe/traced_{name}_step_gb"] = row.step_bytes / 1e9
    step = tables["traces"].set_index("name").step_bytes
    return figures | {
        "probe/large_over_small": step["streamed, large"] / step["streamed, small"],
        "probe/whole_over_streamed": step["whole, large"] / step["streamed, large"],
    }


def _study(tables: Tables) -> dict[str, float | int | None]:
    sweep, predictions = tables["sweep"], tables["predictions"]
    figures = {f"study/step{row.step}/x{row.multiple:g}/{name}": getattr(row, name)
               for row in sweep.itertuples() for name in SWEEP}  # fmt: skip
    figures |= {f"study/step{row.step}/{name}": getattr(row, name)
                for row in predictions.itertuples() for name in PREDICTIONS}  # fmt: skip
    figures |= {f"study/{row.dtype}/x{row.multiple:g}/delta_h": row.delta_h for row in tables["precision"].itertuples()}
    figures |= {f"study/peak_bytes/{row.phase.replace(' ', '_')}": row.peak_bytes
                for row in tables["phases"].itertuples()}  # fmt: skip
    agrees = (sweep.delta_h > 0) == (sweep.delta_h1_forward > 0)
    known = sweep.delta_h.abs() > 2 * sweep.delta_h_stderr  # the true change is known to differ from 0
    last = predictions.iloc[-1]
    return figures | {
        "study/sign_agrees_all": float(agrees.mean()),
        "study/sign_all_n": len(sweep),
        "study/sign_agrees": float(agrees[known].mean()) if known.any() else None,
        "study/sign_n": int(known.sum()),
        "study/samples": int(last.samples),
        "study/prompts": int(last.prompts),
    }
