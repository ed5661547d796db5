"""Figures of experiment 4, from its tables."""

from __future__ import annotations

from grade.experiments.exp4.measure.tables import Settings
from grade.experiments.measured import Tables

GIB = 2**30
PUBLISHED = {
    "legacy_fp32": "start",
    "bf16": "loop",
    "bf16_checkpointed": "loop_checkpointed",
    "all_six": "all_six",
    "autocast": "autocast",
    "replay": "lean",
    "replay_gumbel_trunk": "replay",
    "replay_gumbel_trunk_checkpointed": "replay_checkpointed",
}
"""Names of figures, and the configurations that they are of."""


def metrics(tables: Tables, settings: Settings) -> dict[str, float | str]:
    """Every figure that is the same in each run.

    Names to values: peaks and what the step adds in GiB, operations in TFLOP.
    """
    rows = tables["configurations"].set_index("configuration")
    figures: dict[str, float | str] = {"exp4/model": settings.model}
    for key, name in PUBLISHED.items():
        figures[f"exp4/{key}_peak_gib"] = rows.peak_bytes[name] / GIB
        figures[f"exp4/{key}_step_gib"] = rows.step_bytes[name] / GIB
        figures[f"exp4/{key}_tflop"] = rows.flops[name] / 1e12
    return figures


def timed_metrics(tables: Tables) -> dict[str, float]:
    """Seconds that the traces of the configurations took, summed."""
    return {"exp4/trace_seconds": tables["seconds"].seconds.sum()}
