"""Figures of the training comparison, from its tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.frontier import frontier_table
from grade.experiments.plotting import INTERVAL, by_method, palette, panels, with_ends
from grade.gradients.methods import RELAXED


def frontier_levels(kl_levels: Sequence[float], n: int = 60) -> list[float]:
    """A grid of KL for `frontier_figure`: a fifth beyond the largest of the table's levels, with all of them on it.

    >>> frontier_levels([2.0, 5.0], n=3)
    [2.0, 4.0, 5.0, 6.0]
    """
    grid = np.linspace(0, 1.2 * max(kl_levels), n + 1)[1:]
    return sorted({*(round(float(x), 9) for x in grid), *map(float, kl_levels)})


def frontier_figure(curves: pd.DataFrame, kl_levels: Sequence[float]) -> Figure:
    """Highest held-out reward at KL of at most x, of relaxed methods and of policy gradients; bands: 1 standard error.

    Not a straight segment between two evaluations, but the mean over seeds of the best mixture of two policies, and
    the running maximum of that.
    """
    table = frontier_table(curves, frontier_levels(kl_levels))
    best = table.loc[table[table["kl"].isin(kl_levels)].groupby("kl")["reward"].idxmax()]
    title = "Most reward at KL of at most " + ", ".join(f"{row.kl:g}: {row.method}" for row in best.itertuples())
    grid = panels(sns.relplot, with_ends(_with_family(table), "reward"), title, x="kl", y="reward",
                  col="family", kind="line", hue="method", palette=palette(table["method"]),
                  height=3.6, **INTERVAL)  # fmt: skip
    grid.set_titles("{col_name}").set_axis_labels("KL of at most, nats per completion", "highest held-out reward")
    return grid.figure


def learning_figure(curves: pd.DataFrame, beta: float) -> Figure:
    """Held-out reward along training at one weight of KL: mean over seeds, band of one standard error."""
    table = curves[curves["beta"] == beta]
    means = table.pivot_table("reward", "samples", "method")
    best = means.iloc[[len(means) // 4, -1]].idxmax(axis=1)
    title = "Most reward after " + ", ".join(f"{n:.0f} completions: {method}" for n, method in best.items())
    grid = panels(sns.relplot, table, title, x="samples", y="reward", kind="line", errorbar="se", height=3.8,
                  aspect=1.6, **by_method(table))  # fmt: skip
    label = f"held-out reward ({table['seed'].nunique()} seeds, ± 1 s.e.)"
    grid.set_axis_labels("completions generated", label)
    return grid.figure


def _with_family(table: pd.DataFrame) -> pd.DataFrame:
    relaxed = table["method"].isin(RELAXED)
    return table.assign(family=np.where(relaxed, "relaxed gradients", "policy gradients"))
