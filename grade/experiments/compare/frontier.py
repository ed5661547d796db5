"""Statistics of the comparison over methods, weights of KL and seeds: pure functions of tidy tables.

The tables are the measured `curves` (evaluations along training) and `finals` (ends of runs). How rewards are compared
at equal KL is in `grade.experiments.frontier`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from grade.errors import InputError
from grade.experiments.frontier import estimate_figures, reward_at_kl
from grade.stats import Estimate

QUALITIES = ("reward", "gold", "kl", "perplexity", "distinct1", "distinct2")
"""Columns of the ends of runs that are averaged over seeds."""


def frontier_figures(curves: pd.DataFrame, levels: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Metrics ``frontier/<method>/kl<level>`` with ``_stderr`` and ``_n``: `reward_at_kl` over seeds.

    ``frontier/<method>/kl_reached`` is the largest KL of any run, averaged over seeds: beyond it a method's frontier is
    flat.
    """
    figures: dict[str, float] = {}
    for level in levels:
        for method, values in reward_at_kl(curves, level).items():
            figures |= estimate_figures(f"{prefix}frontier/{method}/kl{level:g}", values.values())
    reached = curves.groupby(["method", "seed"], sort=False)["kl"].max().groupby("method", sort=False).mean()
    return figures | {f"{prefix}frontier/{method}/kl_reached": float(value) for method, value in reached.items()}


def final_figures(finals: pd.DataFrame, beta: float, prefix: str = "") -> dict[str, float]:
    """Ends of the runs at one beta: means over seeds with standard errors and n.

    ``gain/<method>`` (held-out reward minus the untrained policy's), ``gold_gain/...``, and under ``final/<method>/``
    `QUALITIES` and ``samples``.

    Returns:
        The metrics.
    """
    rows = finals[finals["beta"] == beta]
    if rows.empty:
        raise InputError("beta", beta, f"one of {sorted(set(finals['beta']))}")
    figures: dict[str, float] = {}
    for method, runs in rows.groupby("method", sort=False):
        for name in ("gain", "gold_gain"):
            figures |= estimate_figures(f"{prefix}{name}/{method}", runs[name].dropna())
        for name in QUALITIES:
            figures |= estimate_figures(f"{prefix}final/{method}/{name}", runs[name].dropna())
        figures[f"{prefix}final/{method}/samples"] = int(runs["samples"].iloc[0])
    return figures


def overoptimisation(curves: pd.DataFrame) -> pd.DataFrame:
    """How far the gold judge follows the trained reward: slope of gold on reward over each method's evaluations.

    A slope of 1 means that every gain is shared, 0 that all of it is an exploit. Each seed gives one slope.

    Returns:
        Columns ``method``, ``slope``, ``stderr``, ``n``.
    """
    rows = []
    for method, runs in curves.dropna(subset=["gold"]).groupby("method", sort=False):
        seeds = [one for _, one in runs.groupby("seed") if len(one) > 1]
        slopes = [float(np.polyfit(one["reward"], one["gold"], 1)[0]) for one in seeds]
        if slopes:
            rows.append((method, *Estimate.of(slopes)))
    return pd.DataFrame(rows, columns=["method", "slope", "stderr", "n"])
