"""Figures of the probe's validation."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from grade.plotting import SERIES, color


def plot_first_order(ax: Axes, table: pd.DataFrame) -> Axes:
    """Predicted against true change of entropy, both in absolute value, on log axes.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.validation.measure.study.first_order_table`.

    Returns:
        The axes.
    """
    for i, (way, mark) in enumerate({"forward": "o", "reverse": "s", "two_batch": "^"}.items()):
        ax.plot(table.exact.abs(), table[way].abs(), mark, color=SERIES[i], markersize=11 - 3 * i, fillstyle="none",
                label=way.replace("_", " "))  # fmt: skip
    ends = [table.exact.abs().min(), table.exact.abs().max()]
    ax.plot(ends, ends, color=color("line"), linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_title("Every way of predicting meets the true change")
    ax.set_xlabel("true change, nats a completion")
    ax.set_ylabel("predicted change, nats a completion")
    ax.legend()
    return ax


def plot_importance(ax: Axes, table: pd.DataFrame) -> Axes:
    """Mean estimate over true change by importance sampling, against the effective share of the samples.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.validation.measure.study.importance_table`.

    Returns:
        The axes.
    """
    for series, way, label in zip(SERIES, ("whole", "prefix"), ("completions", "prefixes"), strict=False):
        rows = table[table.way == way]
        ax.errorbar(rows.ess, rows["mean"] / rows.exact, yerr=2 * rows.bias_stderr / rows.exact.abs(), fmt="o",
                    color=series, capsize=3, label=f"weights of {label}")  # fmt: skip
    for row in table[table.way == "whole"].itertuples():
        ax.annotate(f"step {row.eta:g}", (row.ess, row.mean / row.exact), xytext=(5, 5), textcoords="offset points",
                    fontsize=9)  # fmt: skip
    ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    ax.set_title("Importance sampling is right while enough samples count")
    ax.set_xlabel("effective share of the samples (larger steps to the left)")
    ax.set_ylabel("estimate / true change")
    ax.legend()
    return ax
