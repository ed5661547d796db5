"""Figures of the probe's validation."""

from __future__ import annotations

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.plotting import INTERVAL, SERIES, color, panels, with_ends


def first_order_figure(table: pd.DataFrame) -> Figure:
    """Predicted against true change of entropy, both in absolute value, on log axes."""
    ways = {"forward": "forward mode", "reverse": "reverse mode", "two_batch": "two batches"}
    shown = table.rename(columns=ways).abs().melt("exact", list(ways.values()), "way", "predicted")
    grid = panels(sns.relplot, shown, "Every way of predicting meets the true change", x="exact", y="predicted",
                  hue="way", palette=SERIES[:3], style="way", s=80, alpha=0.6, height=3.6, aspect=1.5)  # fmt: skip
    grid.ax.axline((shown.exact.min(),) * 2, (shown.exact.max(),) * 2, color=color("line"), linewidth=1, linestyle="--")
    grid.set(xscale="log", yscale="log", xlabel="true change, nats per completion",
             ylabel="predicted change, nats per completion")  # fmt: skip
    return grid.figure


def importance_figure(table: pd.DataFrame) -> Figure:
    """Mean estimate over true change by importance sampling, ± 2 SE, by step size."""
    ratio, error = table["mean"] / table.exact, 2 * table.bias_stderr / table.exact.abs()
    share = table.ess.map("{:.0%}".format)
    shown = table.assign(
        ratio=ratio, low=ratio - error, high=ratio + error, step=table.eta.map("{:g}".format) + "\n" + share,
        weights="weights of " + table.way.map({"whole": "completions", "prefix": "prefixes"}),
    )  # fmt: skip
    grid = panels(
        sns.catplot, with_ends(shown, "ratio"), "Importance sampling meets the truth within its error", kind="point",
        x="step", y="ratio", hue="weights", palette=SERIES[:2], dodge=0.3, linestyle="none", capsize=0.1,
        markersize=6, height=3.6, aspect=1.5, err_kws=dict(linewidth=1.5), **INTERVAL,
    )  # fmt: skip
    for ax in grid.axes.flat:
        ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    grid.set(xlabel="step size, and effective share of the samples", ylabel="estimate / true change, ± 2 SE")
    return grid.figure
