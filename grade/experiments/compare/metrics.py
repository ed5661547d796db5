"""Figures of the comparison, from its tables."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import pandas as pd

from grade.experiments.compare.measure.tables import Settings
from grade.experiments.frontier import estimates, paired_figures, paired_table, rewards_at_kl
from grade.experiments.measured import Tables, figures_of
from grade.stats import Estimate

QUALITIES = ("reward", "gold", "kl")
"""Columns of the ends of runs that are averaged over seeds."""
REFERENCES = ("ste", "reinforce", "rloo", "ppo")
"""Methods that every other one is compared with, where they were run."""


def metrics(tables: Tables, settings: Settings) -> dict[str, Any]:
    """Every figure of the experiment.

    KL is in nats per completion, except for ``defects/kl_*``, in nats per token.
    """
    figures = {f"untrained/{name}": value for name, value in tables["untrained"].items()}
    figures |= frontier_figures(tables["curves"], settings.kl_levels)
    figures |= final_figures(tables["finals"], settings.headline_beta)
    figures |= paired_figures(paired_rewards(tables, settings), "paired/{method}_minus_{against}/{of}")
    defects = {f"defects/{name}": value for name, value in tables["defects"].items()}
    del defects["defects/loss_plus_reward_with_kl"]
    return figures | defects


def level_table(curves: pd.DataFrame, levels: list[float]) -> pd.DataFrame:
    """Reward at each KL, method by method, as text with standard errors."""
    seeds = rewards_at_kl(curves, levels).groupby(["method", "kl"], sort=False)["reward"]
    table = seeds.agg(lambda rewards: str(Estimate.of(rewards))).unstack(sort=False)
    return table.rename(columns="KL {:g}".format).rename_axis(index=None, columns=None)


def final_table(figures: Mapping[str, Any], methods: Sequence[str]) -> pd.DataFrame:
    """Ends of runs at one weight of KL, from `final_figures`: means over seeds with standard errors, as text."""
    rows = {}
    for method in methods:
        keys = {name: f"{name}/{method}" for name in ("gain", "gold_gain")}
        keys |= {name: f"final/{method}/{name}" for name in QUALITIES}
        rows[method] = {name: f"{figures[key]:.4g} ± {figures.get(f'{key}_stderr', math.nan):.2g}"
                        for name, key in keys.items() if key in figures}  # fmt: skip
        rows[method]["completions"] = figures[f"final/{method}/samples"]
        rows[method]["seeds"] = figures[f"gain/{method}_n"]
    return pd.DataFrame(rows).T.rename_axis("method")


def paired_rewards(tables: Tables, settings: Settings) -> pd.DataFrame:
    """`paired_table` of gains at equal samples (``gain``) and of rewards at equal KL (``kl<level>``)."""
    curves, finals = tables["curves"], tables["finals"]
    gains = finals[finals["beta"] == settings.headline_beta].assign(of="gain", reward=lambda ends: ends["gain"])
    rewards = rewards_at_kl(curves, settings.kl_levels).assign(of=lambda rows: rows["kl"].map("kl{:g}".format))
    return paired_table(pd.concat([gains, rewards]), REFERENCES, "of")


def pair_table(figures: Mapping[str, Any], methods: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """Differences ``paired/<method>_minus_<against>/<name>`` between methods with their p, each pair once."""
    rows = {}
    for pair in combinations(methods, 2):
        for method, against in (pair, pair[::-1]):
            cells = {}
            for name in names:
                if (key := f"paired/{method}_minus_{against}/{name}") in figures:
                    p = figures.get(f"{key}_p", math.nan)
                    cells[name] = f"{figures[key]:+.3f} ± {figures[f'{key}_stderr']:.3f}, p = {p:.2g}"
            if cells and (against, method) not in rows:
                rows[method, against] = cells
    return pd.DataFrame(rows).T.rename_axis(["method", "minus"])


def frontier_figures(curves: pd.DataFrame, levels: list[float]) -> dict[str, float]:
    """Metrics ``frontier/<method>/kl<level>``: means of `rewards_at_kl` over seeds."""
    return estimates(rewards_at_kl(curves, levels), "frontier/{method}/kl{kl:g}", {"": "reward"})


def final_figures(finals: pd.DataFrame, beta: float) -> dict[str, float]:
    """Ends of the runs at one beta: means over seeds with standard errors and n.

    ``gain/<method>`` (held-out reward minus the untrained policy's), ``gold_gain/...``, and under ``final/<method>/``
    `QUALITIES` and ``samples``.
    """
    ends = finals[finals["beta"] == beta]
    return (
        estimates(ends, "gain/{method}", {"": "gain"})
        | estimates(ends, "gold_gain/{method}", {"": "gold_gain"})
        | estimates(ends, "final/{method}", {f"/{name}": name for name in QUALITIES})
        | figures_of(ends.drop_duplicates("method"), "final/{method}", ["samples"])
    )
