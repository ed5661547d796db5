"""Statistics of the training runs: how many samples a method needs for what `rloo` ends with, and reward at equal KL.

A seed decides adapter, prompts and noise of every method alike, so methods are compared seed by seed. An end of a run
is the mean of its last two evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from grade.experiments.frontier import reward_at_kl
from grade.stats import Interval, interval, paired

AGAINST = "rloo"
KL_MARGIN = 1.1
"""How much more KL than the baseline's final one a method may have where it reaches the baseline's final reward."""
LAST = 2
"""Evaluations that make the end of a run: a single one has the noise of 128 completions."""


def subject_name(policy: str, reward: str) -> str:
    """The short name of a policy and its reward.

    >>> [subject_name(*pair) for pair in (("tiny", "gold"), ("smollm2", "rule"), ("tiny", "rule"), ("sums", "sums"))]
    ['tiny_gold', 'smollm2_rule', 'rule', 'sums']
    >>> subject_name("tiny", "smollm2_trunk")
    'text'
    """
    if policy == "smollm2":
        return f"smollm2_{reward}"
    return {"smollm2_trunk": "text", "rule": "rule", "sums": "sums"}.get(reward, f"tiny_{reward}")


def subjects(runs: pd.DataFrame) -> Iterator[tuple[str, int, bool, pd.DataFrame]]:
    """Name, completions per step, whether these are the subject's most, and the curves of each."""
    for (policy, reward), rows in runs.groupby(["policy", "trained_on"], sort=False):
        for completions, curves in rows.groupby("completions", sort=False):
            most = completions == rows["completions"].max()
            yield subject_name(policy, reward), int(completions), bool(most), curves.reset_index(drop=True)


def main_runs(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The curves of each subject at the most completions per step."""
    return {name: curves for name, _, most, curves in subjects(runs) if most}


def first_reach(curve: pd.DataFrame, goal: float, most_kl: float) -> tuple[float, float] | None:
    """Samples and KL where a curve first has a reward of at least ``goal`` at a KL of at most ``most_kl``, or None.

    Reward, KL and samples are linear between evaluations.

    >>> curve = pd.DataFrame({"samples": [0, 10, 20], "reward": [0.0, 0.5, 1.0], "kl": [0.0, 1.0, 3.0]})
    >>> first_reach(curve, 0.75, 3.0), first_reach(curve, 0.75, 1.5)
    ((15.0, 2.0), None)
    """
    rows = curve[["samples", "reward", "kl"]].to_numpy(float)
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


def reaches(curves: pd.DataFrame) -> pd.DataFrame:
    """Where each run reaches the final reward of `rloo`'s run of the same seed and target.

    `rloo` itself goes by the same rule: it may have had its final reward before its end. A run that never reaches it is
    censored: it has the samples of its end, so its ratio is too small, and no KL. A seed whose `rloo` gained nothing
    has no goal and is left out.

    A row per run; ``baseline_...`` are `rloo`'s, ``baseline_run`` the samples of its whole run.
    """
    rows = []
    for (target, seed), runs in curves.sort_values("step", kind="stable").groupby(["target_kl", "seed"], sort=False):
        base = runs[runs["method"] == AGAINST]
        goal, final_kl = base["reward"].iloc[-LAST:].mean(), base["kl"].iloc[-LAST:].mean()
        if len(base) < LAST or goal <= base["reward"].iloc[0]:
            continue
        whole = float(base["samples"].iloc[-1])
        own = first_reach(base, goal, KL_MARGIN * final_kl) or (whole, final_kl)
        for method, run in runs.groupby("method", sort=False):
            place = first_reach(run, goal, KL_MARGIN * final_kl)
            samples, kl = place or (float(run["samples"].max()), np.nan)
            rows.append((method, target, seed, samples, kl, place is not None, *own, whole))
    columns = ["method", "target_kl", "seed", "samples", "kl", "reached", "baseline_samples", "baseline_kl",
               "baseline_run"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def ratio_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Samples to `rloo`'s final reward over `rloo`'s own, and the KL there over its KL, of the seeds that reached it.

    Geometric means over seeds, with 95 % intervals (Student's t). ``most``: whether completions per step are the
    subject's most; ``of_run``: over the samples of `rloo`'s whole run. Of ``n`` seeds (0 where `rloo` gained nothing)
    ``censored`` never reached it: with any, ratios are lower bounds.
    """
    rows = []
    for subject, completions, most, curves in subjects(runs):
        if AGAINST not in set(curves["method"]):
            continue
        table = reaches(curves)
        for target, method in curves[["target_kl", "method"]].drop_duplicates().itertuples(index=False):
            one = table[(table["method"] == method) & (table["target_kl"] == target)]
            reached = one[one["reached"].astype(bool)]  # without rows the column has no type
            ratio = geometric(one["samples"] / one["baseline_samples"])
            of_run = geometric(one["samples"] / one["baseline_run"])
            kl = geometric(reached["kl"] / reached["baseline_kl"])
            rows.append((subject, completions, most, target, method, *ratio[:3], of_run.value, *kl[:3], len(one),
                         len(one) - len(reached)))  # fmt: skip
    columns = ["subject", "completions", "most", "target_kl", "method", "ratio", "low", "high", "of_run", "kl_ratio",
               "kl_low", "kl_high", "n", "censored"]  # fmt: skip
    return pd.DataFrame(rows, columns=columns)


def geometric(ratios: Sequence[float]) -> Interval:
    """Geometric mean of independent ratios with its 95 % interval; NaN for none, no interval for one.

    >>> mean = geometric([0.5, 2.0])
    >>> mean.value, round(mean.high)                     # exp(0 + 12.706 * ln 2)
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


def several_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    """The runs of methods with more than one seed."""
    seeds = curves.groupby("method")["seed"].nunique()
    return curves[curves["method"].isin(seeds.index[seeds > 1])]


def paired_table(runs: pd.DataFrame, level: float) -> pd.DataFrame:
    """Rewards at one KL, every method against `ste`, `st` and `rloo`, seed by seed; see `grade.stats.paired`."""
    rows = []
    for subject, curves in main_runs(runs).items():
        curves = several_seeds(curves)
        rewards = reward_at_kl(curves, level, "target_kl") if len(curves) else {}
        for against in ("ste", "st", AGAINST):
            for method, mine in rewards.items():
                if method != against and len(set(mine) & set(rewards.get(against, {}))) > 1:
                    test = paired(mine, rewards[against])
                    rows.append((subject, method, against, *test.difference, test.p))
    return pd.DataFrame(rows, columns=["subject", "method", "against", "difference", "stderr", "n", "p"])
