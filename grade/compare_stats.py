"""Statistics of a comparison over methods, weights of KL and seeds: pure functions of tidy tables.

`CURVES` are evaluations along training, `FINALS` the ends of runs (`grade.compare` makes both). A seed decides adapter,
prompts and noise of every method alike, so methods are compared pair by pair over seeds. Evaluation prompts and their
noise are the same for all runs: standard errors over seeds say how a method varies when it is trained again, not how
the figures would change on other prompts.

**Reward at equal KL.** Along each run reward is interpolated where KL first reaches the given value. Which weight of KL
a method is shown with is chosen for each seed on the *other* seeds, so that the choice does not flatter it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from grade.errors import InputError
from grade.results import Estimate

CURVES = ("method", "beta", "seed", "step", "samples", "seconds", "reward", "gold", "kl")
FINALS = (*CURVES, "gain", "gold_gain", "perplexity", "distinct1", "distinct2")


class Paired(NamedTuple):
    """A paired t-test over seeds.

    Attributes:
        difference: Mean of ``a - b`` with its standard error and n.
        t: Student's t, None where the differences do not vary.
        p: Two-sided p, n - 1 degrees of freedom.
    """

    difference: Estimate
    t: float | None
    p: float | None


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Paired:
    """Compare two methods on the seeds that both have.

    Args:
        a: Seed to value.
        b: Seed to value.

    Returns:
        The test.

    Raises:
        InputError: If fewer than two seeds are shared.

    >>> result = paired({0: 1.0, 1: 2.0, 2: 6.0}, {0: 0.0, 1: 0.0, 2: 3.0})
    >>> print(result.difference, round(result.t, 3), round(result.p, 3))
    2 ± 0.58 (n=3) 3.464 0.074
    """
    seeds = sorted(set(a) & set(b))
    if len(seeds) < 2:
        raise InputError("seeds of both methods", seeds, "at least two, to have a standard error")
    difference = Estimate.of(a[s] - b[s] for s in seeds)
    if not difference.stderr:
        return Paired(difference, None, None)
    t = difference.mean / difference.stderr
    return Paired(difference, t, float(2 * stats.t.sf(abs(t), len(seeds) - 1)))


def first_crossing(x: Sequence[float], y: Sequence[float], level: float) -> float | None:
    """``y`` where ``x`` first reaches a level, linear between neighbours; None if it never does.

    >>> first_crossing([0, 4, 3, 8], [0.5, 0.7, 0.7, 0.9], 2)
    0.6
    >>> first_crossing([0, 4], [0.5, 0.7], 5) is None
    True
    """
    for i, value in enumerate(x):
        if value >= level:
            if i == 0:
                return float(y[0])
            part = (level - x[i - 1]) / (value - x[i - 1])
            return float(y[i - 1] + part * (y[i] - y[i - 1]))
    return None


def along_runs(curves: pd.DataFrame, x: str, y: str, level: float) -> pd.DataFrame:
    """`first_crossing` of every run.

    Args:
        curves: Columns ``method``, ``beta``, ``seed``, ``step``, and ``x`` and ``y``.
        x: Column that has to reach ``level``.
        y: Column that is interpolated.
        level: The level.

    Returns:
        Columns ``method``, ``beta``, ``seed``, ``value`` (NaN where it is not reached).
    """
    rows = []
    for (method, beta, seed), run in curves.groupby(["method", "beta", "seed"], sort=False):
        run = run.sort_values("step")
        value = first_crossing(run[x].tolist(), run[y].tolist(), level)
        rows.append((method, beta, seed, math.nan if value is None else value))
    return pd.DataFrame(rows, columns=["method", "beta", "seed", "value"])


def chosen_on_other_seeds(values: pd.DataFrame) -> dict[int, float]:
    """A method's value for each seed, at the beta that is best on average over the other seeds.

    Only betas whose value exists for every seed take part.

    Args:
        values: One method's rows of `along_runs`.

    Returns:
        Seed to value; empty if no beta has a value for every seed.

    Raises:
        InputError: If there is only one seed, and there is something to choose.
    """
    table = values.pivot(index="seed", columns="beta", values="value").dropna(axis=1)
    if table.shape[1] == 1:
        return table.iloc[:, 0].to_dict()
    if table.shape[1] > 1 and len(table) < 2:
        raise InputError("seeds", table.index.tolist(), "at least two: beta is chosen on the other seeds")
    return {seed: float(table.loc[seed, table.drop(seed).mean().idxmax()]) for seed in table.index if table.shape[1]}


def reward_at_kl(curves: pd.DataFrame, level: float) -> dict[str, dict[int, float]]:
    """Held-out reward where KL reaches a level, method by method and seed by seed; see the module's head.

    Args:
        curves: `CURVES`.
        level: KL in nats a completion.

    Returns:
        Method to seed to reward; methods that do not get there for every seed at any beta have no seed.
    """
    found = along_runs(curves, "kl", "reward", level)
    return {method: chosen_on_other_seeds(rows) for method, rows in found.groupby("method", sort=False)}


def frontier_figures(curves: pd.DataFrame, levels: Sequence[float], prefix: str = "") -> dict[str, float]:
    """Metrics ``frontier/<method>/kl<level>`` with ``_stderr`` and ``_n``; ``_n`` is 0 where it was not reached.

    ``frontier/<method>/kl_reached`` is the largest KL of any run, averaged over seeds.
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
    ``reward``, ``gold``, ``kl``, ``perplexity``, ``distinct1``, ``distinct2``, ``samples`` and ``seconds``.

    Args:
        finals: `FINALS`.
        beta: Weight of KL.
        prefix: Put before each name.

    Returns:
        The metrics.

    Raises:
        InputError: If no run has this beta.
    """
    rows = finals[finals["beta"] == beta]
    if rows.empty:
        raise InputError("beta", beta, f"one of {sorted(set(finals['beta']))}")
    figures: dict[str, float] = {}
    for method, runs in rows.groupby("method", sort=False):
        for name in ("gain", "gold_gain"):
            figures |= estimate_figures(f"{prefix}{name}/{method}", runs[name].dropna())
        for name in ("reward", "gold", "kl", "perplexity", "distinct1", "distinct2", "seconds"):
            figures |= estimate_figures(f"{prefix}final/{method}/{name}", runs[name].dropna())
        figures[f"{prefix}final/{method}/samples"] = int(runs["samples"].iloc[0])
    return figures


def paired_figures(values: Mapping[str, Mapping[int, float]], against: str, name: str) -> dict[str, float]:
    """Every method against one: ``paired/<method>_minus_<against>/<name>`` with ``_stderr``, ``_n``, ``_p``.

    Args:
        values: Method to seed to value.
        against: The method that the others are compared with.
        name: What the values are.

    Returns:
        The metrics; methods that share fewer than two seeds with ``against`` are left out.
    """
    figures: dict[str, float] = {}
    for method, mine in values.items():
        if method == against or len(set(mine) & set(values.get(against, {}))) < 2:
            continue
        test = paired(mine, values[against])
        key = f"paired/{method}_minus_{against}/{name}"
        figures |= estimate_figures(key, None, test.difference)
        if test.p is not None:
            figures[f"{key}_p"] = test.p
    return figures


def estimate_figures(key: str, values: Iterable[float] | None, estimate: Estimate | None = None) -> dict[str, float]:
    """``key``, ``key_stderr`` and ``key_n`` of a mean; only ``key_n`` = 0 without values."""
    if estimate is None:
        values = [] if values is None else list(values)
        if not values:
            return {f"{key}_n": 0}
        estimate = Estimate.of(values)
    figures = {key: estimate.mean, f"{key}_n": estimate.n}
    return figures if estimate.stderr is None else figures | {f"{key}_stderr": estimate.stderr}


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
