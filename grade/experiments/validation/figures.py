"""Figures of the probe's validation."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes


def plot_first_order(ax: Axes, table: pd.DataFrame) -> Axes:
    """Predicted against true change of entropy, both in absolute value, on log axes.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.validation.study.first_order_table`.

    Returns:
        The axes.
    """
    marks = {"forward": ("#0072B2", "o"), "reverse": ("#D55E00", "s"), "two_batch": ("#009E73", "^")}
    for i, (way, (color, marker)) in enumerate(marks.items()):
        ax.plot(table.exact.abs(), table[way].abs(), marker, color=color, markersize=11 - 3 * i, fillstyle="none",
                label=way.replace("_", " "))  # fmt: skip
    ends = [table.exact.abs().min(), table.exact.abs().max()]
    ax.plot(ends, ends, color="#888888", linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("true change, nats")
    ax.set_ylabel("predicted change, nats")
    ax.legend()
    return ax


def plot_importance(ax: Axes, table: pd.DataFrame) -> Axes:
    """Mean estimate over true change by importance sampling, against the effective share of the samples.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.validation.study.importance_table`.

    Returns:
        The axes.
    """
    for way, color, label in (("whole", "#0072B2", "completions"), ("prefix", "#D55E00", "prefixes")):
        rows = table[table.way == way]
        ax.errorbar(rows.ess, rows["mean"] / rows.exact, yerr=2 * rows.bias_stderr / rows.exact.abs(), fmt="o",
                    color=color, capsize=3, label=f"weights of {label}")  # fmt: skip
    for row in table[table.way == "whole"].itertuples():
        ax.annotate(f"step {row.eta:g}", (row.ess, row.mean / row.exact), xytext=(5, 5), textcoords="offset points",
                    fontsize=9)  # fmt: skip
    ax.axhline(1, color="#888888", linewidth=1, linestyle="--")
    ax.set_xlabel("effective share of the samples")
    ax.set_ylabel("estimate / true change")
    ax.legend()
    return ax
