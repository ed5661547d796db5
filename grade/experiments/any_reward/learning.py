"""Statistics of the training runs: how many samples a method needs for what `rloo` ends with, and reward at equal KL.

Pure functions of the curves (`grade.experiments.any_reward.measure.runs.COLUMNS`), of one policy, reward and number of
completions a step. A seed decides adapter, prompts and noise of every method alike, so methods are compared seed by
seed. An end of a run is the mean of its last two evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from grade.errors import InputError
from grade.experiments.frontier import paired_figures, reward_at_kl
from grade.stats import Estimate, Interval, interval

AGAINST = "rloo"
KL_MARGIN = 1.1
"""How much more KL than the baseline's final one a method may have where it reaches the baseline's final reward."""
LAST = 2
"""Evaluations that make the end of a run: a single one has the noise of 128 completions."""


def first_reach(curve: pd.DataFrame, goal: float, most_kl: float) -> tuple[float, float] | None:
    """Where a curve first has a reward of at least ``goal`` at a KL of at most ``most_kl``.

    Reward, KL and samples are linear between evaluations.

    Args:
        curve: Evaluations of one run.
        goal: Reward.
        most_kl: In nats a completion.

    Returns:
        Samples and KL there; None if there is no such place.

    >>> curve = pd.DataFrame({"samples": [0, 10, 20], "reward": [0.0, 0.5, 1.0], "kl": [0.0, 1.0, 3.0]})
    >>> first_reach(curve, 0.75, 3.0), first_reach(curve, 0.75, 1.5)
    ((15.0, 2.0), None)
    """
    points = curve.sort_values("step") if "step" in curve else curve
    rows = points[["samples", "reward", "kl"]].to_numpy(float)
    for start, end in zip(rows, rows[1:], strict=False):
        rising, falling = _share(start[1] - goal, end[1] - goal), _share(most_kl - start[2], most_kl - end[2])
        first, last = max(rising[0], falling[0]), min(rising[1], falling[1])
        if first <= last:
            samples, _, kl = start + first * (end - start)
            return float(samples), float(kl)
    return None


def _share(start: float, end: float) -> tuple[float, float]:
    """The part of a segment, in 0..1, along which a linear function is at least 0; (1, 0) for none."""
    if start < 0 and end < 0:
        return 1.0, 0.0
    if start >= 0 and end >= 0:
        return 0.0, 1.0
    zero = start / (start - end)
    return (0.0, zero) if start >= 0 else (zero, 1.0)


def reaches(curves: pd.DataFrame, against: str = AGAINST) -> pd.DataFrame:
    """Where each run reaches the final reward of the baseline's run of the same seed and target.

    The baseline itself goes by the same rule: it may have had its final reward before its end. A run that never
    reaches it is censored: it has the samples of its end, so its ratio is too small, and no KL. A seed whose baseline
    gained nothing has no goal and is left out.

    Args:
        curves: Runs of all methods.
        against: The baseline.

    Returns:
        One row for each run: ``method``, ``target_kl``, ``seed``, ``goal``, ``most_kl``, ``samples``, ``kl`` (NaN if
        censored), ``reached``, ``baseline_samples``, ``baseline_kl`` and ``baseline_run`` (samples of its whole run).

    Raises:
        InputError: If there is no run of the baseline.
    """
    if against not in set(curves["method"]):
        raise InputError("method", against, f"one of {', '.join(dict.fromkeys(curves['method']))}")
    rows = []
    for target, seed, base, runs in _seeds(curves, against):
        goal, final_kl = (float(base[name].iloc[-LAST:].mean()) for name in ("reward", "kl"))
        if goal <= base["reward"].iloc[0]:
            continue
        whole = float(base["samples"].iloc[-1])
        own = first_reach(base, goal, KL_MARGIN * final_kl) or (whole, final_kl)
        for method, run in runs.groupby("method", sort=False):
            found = first_reach(run, goal, KL_MARGIN * final_kl)
            samples, kl = found or (float(run["samples"].max()), np.nan)
            rows.append((method, target, seed, goal, KL_MARGIN * final_kl, samples, kl, found is not None, *own, whole))
    columns = ["method", "target_kl", "seed", "goal", "most_kl", "samples", "kl", "reached", "baseline_samples",
               "baseline_kl", "baseline_run"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def _seeds(curves: pd.DataFrame, against: str) -> Iterator[tuple[float, int, pd.DataFrame, pd.DataFrame]]:
    """Target, seed, the baseline's run, and all runs."""
    for (target, seed), runs in curves.groupby(["target_kl", "seed"], sort=False):
        base = runs[runs["method"] == against].sort_values("step")
        if len(base) and base["step"].duplicated().any():
            raise InputError("curves", "several runs of one method, target and seed", "one policy, reward and batch")
        if len(base) >= LAST:
            yield float(target), int(seed), base, runs


def sample_ratios(curves: pd.DataFrame, against: str = AGAINST) -> pd.DataFrame:
    """Samples to the baseline's final reward over the baseline's own, and the KL there over its KL.

    Args:
        curves: Runs of all methods.
        against: The baseline.

    Returns:
        One row for each method and target: ``method``, ``target_kl``, ``ratio`` (the geometric mean over seeds),
        ``low`` and ``high`` (its 95 % interval, of Student's t), ``of_run`` (the same over the samples of the
        baseline's whole run), ``kl_ratio``, ``kl_low``, ``kl_high`` (of the seeds that reached it), ``n`` seeds and how
        many of them are ``censored``: with any, ratios are lower bounds.
    """
    rows = []
    for (method, target), runs in reaches(curves, against).groupby(["method", "target_kl"], sort=False):
        ratio = geometric(runs["samples"] / runs["baseline_samples"])
        of_run = geometric(runs["samples"] / runs["baseline_run"])
        reached = runs[runs["reached"]]
        kl = geometric(reached["kl"] / reached["baseline_kl"])
        rows.append((method, target, ratio.value, ratio.low, ratio.high, of_run.value, kl.value, kl.low, kl.high,
                     len(runs), int((~runs["reached"]).sum())))  # fmt: skip
    columns = ["method", "target_kl", "ratio", "low", "high", "of_run", "kl_ratio", "kl_low", "kl_high", "n",
               "censored"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def geometric(ratios: Sequence[float]) -> Interval:
    """Geometric mean of independent ratios with its 95 % interval; NaN for none, no interval for one.

    >>> found = geometric([0.5, 2.0])
    >>> found.value, round(found.high)                     # exp(0 + 12.706 * ln 2)
    (1.0, 6683)
    """
    values = np.asarray(ratios, float)
    if len(values) < 2:
        return Interval(float(values[0]) if len(values) else np.nan, None, None, None, len(values))
    logs = np.log(values)
    without = (logs.sum() - logs) / (len(logs) - 1)  # the jackknife of a mean is its standard error
    return interval(np.exp(np.concatenate([[logs.mean()], without])), geometric=True)


def ends(curves: pd.DataFrame) -> pd.DataFrame:
    """Ends of runs: ``method``, ``target_kl``, ``seed``, ``reward``, ``gold``, ``kl`` and ``gain``.

    All are means of the last evaluations; the gain is over the untrained policy's reward.
    """
    rows = []
    for names, run in curves.sort_values("step").groupby(["method", "target_kl", "seed"], sort=False):
        last = run.iloc[-LAST:]
        gain = last["reward"].mean() - run["reward"].iloc[0]
        rows.append((*names, *(float(last[name].mean()) for name in ("reward", "gold", "kl")), gain))
    return pd.DataFrame(rows, columns=["method", "target_kl", "seed", "reward", "gold", "kl", "gain"])


def paired_ends(curves: pd.DataFrame, target_kl: float, against: str = AGAINST) -> dict[str, float]:
    """Every method's end minus the baseline's, at one target: ``paired/<method>_minus_<against>/<name>``.

    Names are ``reward``, ``gold`` and ``kl``; each with ``_stderr``, ``_n``, ``_p``.
    """
    at = ends(curves)
    at = at[at["target_kl"] == target_kl]
    figures: dict[str, float] = {}
    for name in ("reward", "gold", "kl"):
        known = at.dropna(subset=[name])
        methods = known.groupby("method", sort=False)
        values = {method: rows.set_index("seed")[name].to_dict() for method, rows in methods}
        figures |= paired_figures(values, against, name)
    return figures


def paired_at_kl(curves: pd.DataFrame, level: float, against: str = AGAINST) -> dict[str, float]:
    """Every method's reward at equal KL minus the baseline's: ``paired/<method>_minus_<against>/kl<level>``.

    Mixtures are over targets and steps; see `grade.experiments.frontier.reward_at_kl`.
    """
    return paired_figures(reward_at_kl(curves, level, "target_kl"), against, f"kl{level:g}")


def learning_table(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard error over seeds at each evaluation, for curves against samples, seconds and KL.

    Returns:
        ``method``, ``target_kl``, ``step``, ``samples``, ``seconds``, ``kl``, ``reward``, ``reward_stderr``, ``gold``,
        ``gold_stderr`` (NaN for one seed) and ``n``.
    """
    rows: list[dict[str, Any]] = []
    names = ["method", "target_kl", "step"]
    for key, runs in curves.groupby(names, sort=False):
        row = dict(zip(names, key, strict=True)) | {"samples": int(runs["samples"].iloc[0])}
        row |= {name: float(runs[name].mean()) for name in ("seconds", "kl")}
        for name in ("reward", "gold"):
            known = runs[name].dropna()
            mean, stderr, _ = Estimate.of(known) if len(known) else (np.nan, None, 0)
            row |= {name: mean, f"{name}_stderr": np.nan if stderr is None else stderr}
        rows.append(row | {"n": len(runs)})
    return pd.DataFrame(rows).sort_values(["method", "target_kl", "step"], kind="stable", ignore_index=True)
