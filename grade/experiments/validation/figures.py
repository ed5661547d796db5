"""Figures of the probe's validation."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from grade.plotting import SERIES, color


def plot_first_order(ax: Axes, table: pd.DataFrame) -> Axes:
    """Predicted against true change of entropy, both in absolute value, on log axes."""
    ways = {"forward": ("o", "forward mode"), "reverse": ("s", "reverse mode"), "two_batch": ("^", "two batches")}
    for i, (way, (mark, label)) in enumerate(ways.items()):
        ax.plot(table.exact.abs(), table[way].abs(), mark, color=SERIES[i], markersize=11 - 3 * i, fillstyle="none",
                label=label)  # fmt: skip
    ends = [table.exact.abs().min(), table.exact.abs().max()]
    ax.plot(ends, ends, color=color("line"), linewidth=1, linestyle="--", label="equal")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_title("Every way of predicting meets the true change")
    ax.set_xlabel("true change, nats a completion")
    ax.set_ylabel("predicted change, nats a completion")
    ax.legend()
    return ax


def plot_importance(ax: Axes, table: pd.DataFrame) -> Axes:
    """Mean estimate over true change by importance sampling, against the effective share of the samples."""
    apart = 0.009 * (table.ess.max() - table.ess.min())  # the bars of a step stand side by side
    ways = {"whole": ("o", -apart, "completions"), "prefix": ("s", apart, "prefixes")}
    for series, (way, (mark, shift, label)) in zip(SERIES, ways.items(), strict=False):
        rows = table[table.way == way]
        ax.errorbar(rows.ess + shift, rows["mean"] / rows.exact, yerr=2 * rows.bias_stderr / rows.exact.abs(),
                    fmt=mark, color=series, capsize=3, linewidth=1.5, label=f"weights of {label}, ± 2 SE")  # fmt: skip
    for row in table[table.way == "whole"].itertuples():
        ax.annotate(f"step {row.eta:g}", (row.ess, row.mean / row.exact), xytext=(-7, 5), ha="right",
                    textcoords="offset points", fontsize=9)  # fmt: skip
    ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    ax.margins(x=0.16)
    ax.set_title("Importance sampling meets the truth within its error")
    ax.set_xlabel("effective share of the samples (larger step sizes to the left)")
    ax.set_ylabel("estimate / true change")
    ax.legend()
    return ax
