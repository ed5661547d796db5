"""Figures of the contest with TRL (`grade.experiments.teachers.measure.peers`)."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from grade.experiments.frontier import estimate_figures
from grade.experiments.teachers.measure.peers import ADAPTER, OURS, PEER


def teacher_peer_figures(curves: pd.DataFrame, costs: pd.DataFrame, traces: pd.DataFrame | None) -> dict[str, Any]:
    """Metrics of the contest.

    ``over_trl/<cost>`` is ours over TRL's in the same run, the mean over teachers and seeds: ``seconds`` and
    ``cpu_seconds`` of a step, ``peak`` of the process, and ``peak_beyond_start``, without the libraries;
    ``adapter_over_trl/...`` is the same where ours reads the teacher as an adapter. ``distilled/<teacher>/<trainer>``
    is the divergence at the end, the mean over seeds, ``distilled/<teacher>/start`` that of the untrained policy, and
    ``distilled/<teacher>/difference`` ours less TRL's, paired by seed. ``trl_trace/max_rel_error`` is the largest
    relative error of `grade.experiments.trl_traces`.
    """
    columns = {"seconds": "seconds_per_step", "cpu_seconds": "cpu_seconds_per_step", "peak": "peak_bytes",
               "peak_beyond_start": "beyond"}  # fmt: skip
    costs = costs.assign(beyond=costs["peak_bytes"] - costs["start_bytes"])
    each = costs.set_index(["trainer", "teacher", "seed"])[list(columns.values())]
    figures: dict[str, Any] = {}
    for ours, key in ((OURS, "over_trl"), (ADAPTER, "adapter_over_trl")):
        ratios = each.loc[ours] / each.loc[PEER]
        for name, column in columns.items():
            figures |= estimate_figures(f"{key}/{name}", filter(math.isfinite, ratios[column]))
    for teacher, rows in curves.groupby("teacher", sort=False):
        last = rows[rows["step"] == rows["step"].max()].set_index(["trainer", "seed"])["divergence"]
        untrained = rows[(rows["step"] == 0) & (rows["trainer"] == OURS)]
        parts = {"start": untrained["divergence"], OURS: last[OURS], PEER: last[PEER],
                 "difference": last[OURS] - last[PEER]}  # fmt: skip
        for name, values in parts.items():
            figures |= estimate_figures(f"distilled/{teacher}/{name}", values)
    if traces is not None:
        figures["trl_trace/max_rel_error"] = float(traces["rel_error"].abs().max())
    return figures
