"""Figures of the experiment on teachers, from its tables."""

import math
from typing import Any

import pandas as pd

from grade.experiments.frontier import estimate_figures
from grade.experiments.learning import AGAINST, REACHED, reach_table
from grade.experiments.measured import Tables, figures_of, finite
from grade.experiments.teachers.measure.peers import ADAPTER, OURS, PEER

Values = dict[str, Any]


def metrics(tables: Tables) -> Values:
    """Every figure that is the same in every run; what does not exist is None.

    ``hinted/<method>_over_rloo`` (``samples`` for `hinted`) is what a method samples to the best share of right sums of
    `rloo`'s whole run, over `rloo`'s own (`learning.reach_table`). Figures beside TRL are those of
    `teacher_peer_figures`.
    """
    figures: Values = {
        "divergence/worst_error": tables["divergence"][["value", "gradient"]].max(axis=None),
        "trace/teacher_rel_error": tables["traces"]["rel_error"].abs().max(),
    }
    names = reach_table(right_sums(tables["runs"]), AGAINST).replace({"method": {"hinted": "samples"}})
    return finite(figures | figures_of(names, "hinted/{method}_over_rloo", REACHED) | _peers(tables, timed=False))


def timed_metrics(tables: Tables) -> Values:
    """Figures of seconds and of the memory of processes: ``over_trl/...``."""
    return finite(_peers(tables, timed=True))


def right_sums(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with the share of right sums as ``reward`` of all methods, one of which learns no reward."""
    return runs.assign(reward=runs["gold"], subject="sums")


def ends(runs: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of each run."""
    return runs.sort_values("step", kind="stable").groupby(["method", "seed"], sort=False).tail(1).sort_index()


def _peers(tables: Tables, timed: bool) -> Values:
    if (curves := tables.get("peers")) is None:
        return {}
    figures = teacher_peer_figures(curves, tables["peer_costs"], tables["trl_traces"])
    return {name: value for name, value in figures.items() if ("over_trl/" in name) == timed}


def teacher_peer_figures(curves: pd.DataFrame, costs: pd.DataFrame, traces: pd.DataFrame | None) -> dict[str, Any]:
    """Metrics of the contest with TRL (`grade.experiments.teachers.measure.peers`).

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
