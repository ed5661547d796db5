"""Statistics over methods, pressures of KL and seeds that several experiments share: pure functions of tidy tables.

A seed decides adapter, prompts and noise of every method alike, so methods are compared pair by pair over seeds.
Evaluation prompts and their noise are the same for all runs: standard errors over seeds say how a method varies when it
is trained again, not how the figures would change on other prompts.

**Reward at equal KL.** A policy that follows one evaluated policy with probability p and another with 1 - p has the
mean of their rewards and, as KL is convex, at most the mean of their KLs. So the upper concave hull of the evaluated
(KL, reward), over all pressures (weights of KL, or targets for it) and steps, is attainable. Which two policies are
mixed is chosen for each seed on the *other* seeds, so that the choice does not flatter a method.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from grade.errors import InputError
from grade.experiments.intervals import paired
from grade.experiments.measured import figures_of
from grade.stats import Estimate


def upper_hull(kl: Sequence[float], reward: Sequence[float]) -> list[int]:
    """Vertices of the upper concave hull of points: KL increases along them, and reward, by less and less.

    >>> upper_hull([0, 1, 2, 4, 3], [0.5, 0.6, 0.8, 0.9, 0.7])
    [0, 2, 3]
    """

    def above(a: int, b: int, c: int) -> bool:
        """Whether the line from a to c passes above b or through it."""
        return (reward[c] - reward[a]) * (kl[b] - kl[a]) >= (reward[b] - reward[a]) * (kl[c] - kl[a])

    hull: list[int] = []
    for i in sorted(range(len(kl)), key=lambda i: (kl[i], -reward[i])):
        if hull and reward[i] <= reward[hull[-1]]:
            continue
        while len(hull) > 1 and above(hull[-2], hull[-1], i):
            hull.pop()
        hull.append(i)
    return hull


def frontier_table(curves: pd.DataFrame, levels: Sequence[float], pressure: str = "beta") -> pd.DataFrame:
    """The frontier itself, along a grid of levels: ``method``, ``kl``, ``reward`` (mean over seeds), ``low``, ``high``.

    The ends are a standard error away. The first row of a method is its start. What is reached at a KL is not lost at a
    larger one: where the mean falls, as mixtures are chosen on other seeds, the row before it is repeated.
    """
    start = curves[curves["step"] == 0].groupby("method", sort=False, as_index=False)["reward"].mean()
    seeds = rewards_at_kl(curves, levels, pressure).groupby(["method", "kl"], sort=False)["reward"]
    table = pd.concat([start.assign(kl=0.0, sem=0.0), seeds.agg(reward="mean", sem="sem").reset_index()],
                      ignore_index=True)  # fmt: skip
    table = table.assign(low=table["reward"] - table["sem"], high=table["reward"] + table["sem"])
    values = table[["reward", "low", "high"]].where(table["reward"] == table.groupby("method")["reward"].cummax())
    table[["reward", "low", "high"]] = values.groupby(table["method"]).ffill()
    return table[["method", "kl", "reward", "low", "high"]]


def rewards_at_kl(
    curves: pd.DataFrame, levels: Sequence[float], pressure: str = "beta", by: Sequence[str] = ("method",)
) -> pd.DataFrame:
    """Highest held-out ``reward`` at each ``kl`` by method (or more) and ``seed``; see the module's head.

    For each seed the hull of the other seeds' means says which two policies are mixed (by pressure and step); the
    probability is such that this seed's own KL is the level. A policy that is below the level by itself is not mixed.
    """
    table = []
    for names, rows in curves.groupby(list(by), sort=False):
        wide = rows.pivot(index=[pressure, "step"], columns="seed", values=["kl", "reward"])
        kls, rewards = (wide[name].dropna() for name in ("kl", "reward"))
        if kls.shape[1] < 2:
            raise InputError("seeds", kls.columns.tolist(), "at least two: policies are chosen on the other seeds")
        for seed in kls:
            kl, reward = (each.drop(columns=seed).mean(axis=1).tolist() for each in (kls, rewards))
            own = list(zip(kls[seed].tolist(), rewards[seed].tolist(), strict=True))
            hull = upper_hull(kl, reward)
            for level in levels:
                last = next((place for place, i in enumerate(hull) if kl[i] >= level), len(hull))
                pair = hull[max(last - 1, 0) : last + 1]  # the two around the level, or the last if none reaches it
                table.append((*names, int(seed), level, _mixed([own[0], *(own[i] for i in pair)], level)))
    return pd.DataFrame(table, columns=[*by, "seed", "kl", "reward"])


def _mixed(points: Sequence[tuple[float, float]], level: float) -> float:
    """Reward at the level along the points' line; that of the last point that stays below it if none exceeds it."""
    for (k, r), (next_k, next_r) in zip(points, points[1:], strict=False):
        if next_k > level:
            return float(r + (level - k) / (next_k - k) * (next_r - r))
    return float(points[-1][1])


def paired_table(values: pd.DataFrame, references: Sequence[str], of: str) -> pd.DataFrame:
    """Rewards of every method against each reference that was run, seed by seed (`intervals.paired`), by kind (``of``).

    Pairs that share fewer than two seeds are left out.
    """
    table = []
    for kind, rows in values.groupby(of, sort=False):
        each = {method: run.set_index("seed")["reward"].to_dict() for method, run in rows.groupby("method", sort=False)}
        for against in (method for method in references if method in each):
            for method, mine in each.items():
                if method != against and len(mine.keys() & each[against].keys()) > 1:
                    difference, p = paired(mine, each[against])
                    table.append((kind, method, against, *difference, p))
    return pd.DataFrame(table, columns=[of, "method", "against", "difference", "stderr", "n", "p"])


def paired_figures(pairs: pd.DataFrame, key: str) -> dict[str, float]:
    """Metrics ``<key>`` of `paired_table`, with ``_stderr``, ``_n`` and ``_p`` where there are such."""
    columns = {"": "difference", "_n": "n", "_stderr": "stderr", "_p": "p"}
    figures = figures_of(pairs, key, columns)
    return {name: value for name, value in figures.items() if not pd.isna(value)}


def estimates(table: pd.DataFrame, key: str, columns: Mapping[str, str]) -> dict[str, float]:
    """Means over the rows that share a key, which holds columns' names in braces; see `measured.figures_of`.

    >>> estimates(pd.DataFrame(dict(method=["a", "a"], kl=[1.0, 3.0])), "{method}/end", {"_kl": "kl"})
    {'a/end_kl': 2.0, 'a/end_kl_n': 2, 'a/end_kl_stderr': 1.0}
    """
    names, figures = re.findall(r"{(\w+)", key), {}
    for values, rows in table.groupby(names, sort=False):
        place = key.format(**dict(zip(names, values, strict=True)))
        for end, column in columns.items():
            figures |= estimate_figures(place + end, rows[column].dropna())
    return figures


def estimate_figures(key: str, values: Iterable[float]) -> dict[str, float]:
    """``key``, ``key_stderr`` and ``key_n`` of a mean; only ``key_n`` = 0 without values."""
    values = list(values)
    if not values:
        return {f"{key}_n": 0}
    mean, stderr, n = Estimate.of(values)
    return {key: mean, f"{key}_n": n} | ({} if stderr is None else {f"{key}_stderr": stderr})
