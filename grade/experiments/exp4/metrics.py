"""Figures of experiment 4, from its tables."""

from __future__ import annotations

from grade.experiments.exp4.measure.tables import Settings
from grade.experiments.measured import Tables, figures_of

GIB = 2**30
_PUBLISHED = {
    "legacy_fp32": "start", "bf16": "loop", "bf16_checkpointed": "loop_checkpointed", "all_six": "all_six",
    "autocast": "autocast", "replay": "lean", "replay_gumbel_trunk": "replay",
    "replay_gumbel_trunk_checkpointed": "replay_checkpointed",
}  # fmt: skip
"""Names of figures, and the configurations that they are of."""


def metrics(tables: Tables, settings: Settings) -> dict[str, float | str]:
    """Peaks and what the step adds in GiB, operations in TFLOP."""
    rows = tables["configurations"].set_index("configuration").loc[list(_PUBLISHED.values())]
    shown = rows.assign(key=list(_PUBLISHED), peak=rows.peak_bytes / GIB, step=rows.step_bytes / GIB,
                        tflop=rows.flops / 1e12)  # fmt: skip
    ends = {"_peak_gib": "peak", "_step_gib": "step", "_tflop": "tflop"}
    return {"exp4/model": settings.model} | figures_of(shown, "exp4/{key}", ends)


def timed_metrics(tables: Tables) -> dict[str, float]:
    """Seconds that the traces of the configurations took, summed."""
    return {"exp4/trace_seconds": tables["seconds"].seconds.sum()}
