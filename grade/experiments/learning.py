"""Statistics of the training runs: how many samples a method needs for what `rloo` ends with, and reward at equal KL.

A seed decides adapter, prompts and noise of every method alike, so methods are compared seed by seed. An end of a run
is the mean of its last two evaluations.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from grade.experiments import frontier
from grade.experiments.intervals import Interval, interval

AGAINST = "rloo"
KL_MARGIN = 1.1
"""How much more KL than the baseline's final one a method may have where it reaches the baseline's final reward."""
LAST = 2
"""Evaluations that make the end of a run: a single one has the noise of 128 completions."""
REACHED = {"": "ratio", "_low": "low", "_high": "high", "_n": "n", "_censored": "censored"}
"""Ends of names of figures, and the columns of `reach_table` that hold them."""


_TITLES = {"text": "SmolLM2's trunk, tiny model", "rule": "a rule, tiny model"}


def subject_names(policies: Iterable[str], rewards: Iterable[str]) -> list[str]:
    """Short names of policies with their rewards.

    >>> subject_names(["tiny", "smollm2", "tiny", "tiny"], ["gold", "rule", "rule", "smollm2_trunk"])
    ['tiny_gold', 'smollm2_rule', 'rule', 'text']
    """
    special = {"smollm2_trunk": "text", "rule": "rule"}
    return [f"smollm2_{reward}" if policy == "smollm2" else special.get(reward, f"tiny_{reward}")
            for policy, reward in zip(policies, rewards, strict=True)]  # fmt: skip


def title(subject: str) -> str:
    """A subject for people.

    >>> title("smollm2_gold"), title("tiny_trunk_T64"), title("rule")
    ('gold, SmolLM2', 'trunk, tiny model, T = 64', 'a rule, tiny model')
    """
    name, _, length = subject.partition("_T")
    policy, _, reward = name.partition("_")
    named = _TITLES.get(name, f"{reward}, {'SmolLM2' if policy == 'smollm2' else 'tiny model'}")
    return f"{named}, T = {length}" if length else named


def _with_subjects(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their ``subject``, and whether their completions per step are the ``most`` of that subject."""
    runs = runs.assign(subject=subject_names(runs["policy"], runs["trained_on"]))
    return runs.assign(most=runs["completions"] == runs.groupby("subject")["completions"].transform("max"))


def main_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """Those at the subject's most completions per step."""
    return _with_subjects(runs).query("most")


def several_seeds(runs: pd.DataFrame) -> pd.DataFrame:
    """Those of methods that a subject has with more than one seed."""
    return runs[runs.groupby(["subject", "method"])["seed"].transform("nunique") > 1]


def rewards_at_kl(runs: pd.DataFrame, levels: Sequence[float]) -> pd.DataFrame:
    """`frontier.rewards_at_kl` by subject, of methods with several seeds."""
    return frontier.rewards_at_kl(several_seeds(runs), levels, "target_kl", ("subject", "method"))


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


def _reach(run: pd.DataFrame, base: pd.DataFrame) -> dict[str, float]:
    """Where a run reaches the goal that `rloo`'s run of the same seed sets, over where `rloo` does.

    `rloo` itself goes by the same rule: it may have had its final reward before its end. A run that never reaches it is
    censored: it has the samples of its end, so its ratio is too small, and no KL.
    """
    goal, final_kl, whole = base["reward"].iloc[-LAST:].mean(), base["kl"].iloc[-LAST:].mean(), base["samples"].iloc[-1]
    samples, kl = first_reach(base, goal, KL_MARGIN * final_kl) or (whole, final_kl)
    own_samples, own_kl = first_reach(run, goal, KL_MARGIN * final_kl) or (run["samples"].max(), np.nan)
    return dict(ratio=own_samples / samples, of_run=own_samples / whole, kl_ratio=own_kl / kl)


def ratio_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Samples to `rloo`'s final reward over `rloo`'s own, and the KL there over its KL, of the seeds that reached it.

    Geometric means over seeds, with 95 % intervals (Student's t). ``most``: whether completions per step are the
    subject's most; ``of_run``: over the samples of `rloo`'s whole run. Of ``n`` seeds (without those whose `rloo`
    gained nothing, which set no goal) ``censored`` never reached it: with any, ratios are lower bounds.
    """
    table = []
    keys = ["subject", "completions", "most", "target_kl"]
    for place, curves in _with_subjects(runs).sort_values("step", kind="stable").groupby(keys, sort=False):
        base = {seed: run for seed, run in curves[curves["method"] == AGAINST].groupby("seed")}
        goals = {seed: run for seed, run in base.items()
                 if len(run) >= LAST and run["reward"].iloc[-LAST:].mean() > run["reward"].iloc[0]}  # fmt: skip
        for method, of_method in curves.groupby("method", sort=False) if base else ():
            each = [_reach(run, goals[seed]) for seed, run in of_method.groupby("seed", sort=False) if seed in goals]
            each = pd.DataFrame(each, columns=["ratio", "of_run", "kl_ratio"])
            ratio, kl = geometric(each["ratio"]), geometric(each["kl_ratio"].dropna())
            table.append(dict(zip(keys, place, strict=True), method=method, ratio=ratio.value, low=ratio.low,
                              high=ratio.high, of_run=geometric(each["of_run"]).value, kl_ratio=kl.value, kl_low=kl.low,
                              kl_high=kl.high, n=len(each), censored=each["kl_ratio"].isna().sum()))  # fmt: skip
    return pd.DataFrame(table)


def reach_table(runs: pd.DataFrame, against: str) -> pd.DataFrame:
    """Samples to the best reward of a baseline's whole run, at no more KL, over the samples of the baseline.

    Means over seeds, then their ratio, with a 95 % interval (jackknife over seeds):
    a method that needs none has a ratio of 0. Of ``n`` seeds ``censored`` never reached it and count with their end, so
    with any the ratio is a lower bound, without an interval if all are. Best is the best evaluation: its noise helps
    the baseline. A run may mix two of the policies that were evaluated so far (`frontier`): else a method that is
    better at equal KL may never have both the reward and the KL of a single evaluation of another. Columns subject,
    method, and those of `REACHED`.
    """
    table = []
    curves = runs.sort_values("step", kind="stable")
    for subject, rows in curves.groupby("subject", sort=False):
        base = {seed: run for seed, run in rows[rows["method"] == against].groupby("seed")}
        for method, of_method in rows[rows["method"] != against].groupby("method", sort=False):
            spent = [_spent(run, base[seed]) for seed, run in of_method.groupby("seed") if seed in base]
            if not spent:
                continue
            own, its, missed = (np.array(column) for column in zip(*spent, strict=True))
            ratio = _ratio(own, its)
            if missed.all():  # how far above the bound it is, nothing tells
                ratio = Interval(ratio.value)
            table.append((subject, method, *ratio[:3], len(spent), missed.sum()))
    return pd.DataFrame(table, columns=["subject", "method", "ratio", "low", "high", "n", "censored"])


def _spent(run: pd.DataFrame, base: pd.DataFrame) -> tuple[float, float, bool]:
    """What both spend to the base's best reward, and whether the run never reaches it."""
    best = base.loc[base["reward"].idxmax()]
    kl, reward = run["kl"].tolist(), run["reward"].tolist()
    mixed = [frontier.mixed_reward(kl[:n], reward[:n], best["kl"]) for n in range(1, len(run) + 1)]
    reached = first_reach(run.assign(reward=mixed, kl=best["kl"]), best["reward"], best["kl"])
    return (run["samples"].max() if reached is None else reached[0]), best["samples"], reached is None


def _ratio(own: np.ndarray, base: np.ndarray) -> Interval:
    """The ratio of two means, with its interval, which does not go below 0; a baseline that gained nothing: NaN."""
    if not base.sum() > 0:
        return Interval(math.nan)
    ratio = own.sum() / base.sum()
    if len(own) < 2:
        return Interval(float(ratio))
    found = interval(np.array([ratio, *((own.sum() - own) / np.maximum(base.sum() - base, 1e-9))]))
    return found._replace(low=max(found.low, 0.0))


def geometric(ratios: Sequence[float]) -> Interval:
    """Geometric mean of independent ratios with its 95 % interval; NaN for none, no interval for one.

    >>> mean = geometric([0.5, 2.0])
    >>> mean.value, round(mean.high)                     # exp(0 + 12.706 * ln 2)
    (1.0, 6683)
    """
    values = np.asarray(ratios, float)
    if len(values) < 2:
        return Interval(float(values[0]) if len(values) else math.nan)
    logs = np.log(values)
    without = (logs.sum() - logs) / (len(logs) - 1)  # the jackknife of a mean is its standard error
    return interval(np.exp(np.concatenate([[logs.mean()], without])), geometric=True)


def paired_rewards(runs: pd.DataFrame, level: float) -> pd.DataFrame:
    """Rewards at one KL, every method against `ste`, `st` and `rloo`: `paired_table` by subject."""
    return frontier.paired_table(rewards_at_kl(main_runs(runs), [level]), ("ste", "st", AGAINST))
