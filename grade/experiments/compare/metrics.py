"""Figures of the comparison, from its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grade.errors import InputError
from grade.experiments.frontier import estimate_figures, paired_figures, reward_at_kl
from grade.experiments.measured import Tables
from grade.stats import Estimate

if TYPE_CHECKING:
    from grade.experiments.compare.measure.tables import Settings

QUALITIES = ("reward", "gold", "kl", "perplexity", "distinct1", "distinct2")
"""Columns of the ends of runs that are averaged over seeds."""
REFERENCES = ("ste", "reinforce", "rloo", "ppo")
"""Methods that every other one is compared with, where they were run."""


def metrics(tables: Tables, settings: Settings) -> dict[str, Any]:
    """Every figure of the experiment but times; those of the other reward are below ``second/``.

    KL is in nats per completion, except for ``defects/kl_*``, in nats per token.
    """
    s = settings
    curves, finals = (on_reward(tables[name], s.reward) for name in ("curves", "finals"))
    figures = {f"untrained/{name}": value for name, value in tables["untrained"].items()}
    figures |= frontier_figures(curves, s.kl_levels)
    figures |= final_figures(finals, s.headline_beta)
    figures |= _paired(curves, finals, s)
    figures |= {f"gold_slope/{row.method}": row.slope for row in overoptimisation(curves).itertuples()}
    if s.has_second:
        curves, finals = (on_reward(tables[name], s.second_reward) for name in ("curves", "finals"))
        figures |= frontier_figures(curves, s.kl_levels, "second/")
        figures |= final_figures(finals, s.headline_beta, "second/")
    figures |= {name: value for name, value in tables["peer"].items() if not name.startswith("peer/settings/")}
    return figures | {
        f"defects/{name}": value for name, value in tables["defects"].items() if name != "loss_plus_reward_with_kl"
    }


def timed_metrics(tables: Tables, settings: Settings) -> dict[str, Any]:
    """Figures of seconds of training, and the peer's of seconds and memory."""
    figures: dict[str, Any] = dict(tables["peer_times"])
    parts = {"": settings.reward} | ({"second/": settings.second_reward} if settings.has_second else {})
    for prefix, reward in parts.items():
        ends = run_seconds(tables["seconds"], reward, settings.headline_beta)
        for method, rows in ends.groupby("method", sort=False):
            figures |= estimate_figures(f"{prefix}final/{method}/seconds", rows["seconds"])
    return figures


def on_reward(table: pd.DataFrame, reward: str) -> pd.DataFrame:
    """The rows of runs on one reward, without the column ``trained_on``."""
    return table[table["trained_on"] == reward].drop(columns="trained_on").reset_index(drop=True)


def run_seconds(seconds: pd.DataFrame, reward: str, beta: float) -> pd.DataFrame:
    """Seconds of training of each run at one weight of KL: ``method``, ``seed``, ``seconds``."""
    rows = on_reward(seconds, reward)
    rows = rows[rows["beta"] == beta].sort_values("step", kind="stable")
    return rows.groupby(["method", "seed"], sort=False, as_index=False)["seconds"].last()


def level_table(curves: pd.DataFrame, levels: list[float]) -> pd.DataFrame:
    """Reward at each KL, method by method, as text with standard errors."""
    columns = {}
    for level in levels:
        values = reward_at_kl(curves, level)
        columns[f"KL {level:g}"] = {method: str(Estimate.of(seeds.values())) for method, seeds in values.items()}
    return pd.DataFrame(columns)


def final_table(finals: pd.DataFrame, beta: float) -> pd.DataFrame:
    """Mean and standard error over seeds of the ends of runs at one weight of KL."""
    columns = ["reward", "gain", "gold_gain", "kl", "perplexity", "distinct1", "distinct2"]
    rows = finals[finals["beta"] == beta].groupby("method", sort=False)
    return rows[columns].agg(["mean", "sem"]).round(4)


def paired_table(figures: Mapping[str, float], names: Sequence[str]) -> pd.DataFrame:
    """Differences of methods with their standard errors and p, each pair once.

    >>> paired_table({"paired/b_minus_a/gain": 0.1, "paired/b_minus_a/gain_stderr": 0.02}, ["gain"]).iloc[0].to_dict()
    {'difference': 'b - a', 'gain': 0.1, 'gain stderr': 0.02, 'gain p': None}
    """
    rows: dict[frozenset[str], dict[str, Any]] = {}
    for key in figures:
        kind, _, rest = key.partition("/")
        if kind != "paired":
            continue
        pair = rest.split("/")[0]
        row = {"difference": pair.replace("_minus_", " - ")}
        for name in names:
            row |= {f"{name}{label}": figures.get(f"paired/{pair}/{name}{end}")
                    for label, end in (("", ""), (" stderr", "_stderr"), (" p", "_p"))}  # fmt: skip
        rows.setdefault(frozenset(pair.split("_minus_")), row)
    return pd.DataFrame(list(rows.values()))


def peer_table(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Metrics ``peer/<name>/<method>`` as a table, one row a method; settings and single figures are left out.

    >>> peer_table({"peer/end_kl/ste": 2.0, "peer/end_kl/grpo": 3.0, "peer/goal_reward": 0.6}).values.tolist()
    [['ste', 2.0], ['grpo', 3.0]]
    """
    rows: dict[str, dict[str, Any]] = {}
    for key, value in figures.items():
        _, name, *method = key.split("/")
        if method and name != "settings":
            rows.setdefault(method[0], {"method": method[0]})[name] = value
    return pd.DataFrame(list(rows.values()))


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
    """
    rows = []
    for method, runs in curves.dropna(subset=["gold"]).groupby("method", sort=False):
        seeds = [one for _, one in runs.groupby("seed") if len(one) > 1]
        slopes = [float(np.polyfit(one["reward"], one["gold"], 1)[0]) for one in seeds]
        if slopes:
            rows.append((method, *Estimate.of(slopes)))
    return pd.DataFrame(rows, columns=["method", "slope", "stderr", "n"])


def _paired(curves: pd.DataFrame, finals: pd.DataFrame, settings: Settings) -> dict[str, float]:
    """Every method against each of `REFERENCES`: gains at equal samples, rewards at equal KL."""
    ends = finals[finals["beta"] == settings.headline_beta]
    gains = {method: rows.set_index("seed")["gain"].to_dict() for method, rows in ends.groupby("method")}
    values = {"gain": gains} | {f"kl{level:g}": reward_at_kl(curves, level) for level in settings.kl_levels}
    figures: dict[str, float] = {}
    for against in (method for method in REFERENCES if method in gains):
        for name, each in values.items():
            figures |= paired_figures(each, against, name)
    return figures
