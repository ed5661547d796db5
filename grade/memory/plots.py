"""Pictures of traces (`grade.memory.tables`): a bar for each peak, and live bytes over a step."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

UNITS = {"GiB": 2**30, "GB": 10**9}
"""Bytes of a binary and of a decimal gigabyte."""
_COLORS = {
    # what a byte is for: what a step adds is warm or dark, what is always there is grey or green
    "weights": "#BBBBBB", "adapter": "#88CCEE", "gradients": "#44AA99", "optimizer": "#117733",
    "activations": "#D55E00", "logits": "#CC79A7", "kv cache": "#332288", "rollout": "#0072B2", "temporary": "#DDCC77",
    # phases of a step that are no category as well
    "forward": "#D55E00", "reference": "#888888", "reward": "#CC79A7", "scoring": "#CC79A7", "backward": "#332288",
}  # fmt: skip
"""Colours of categories and of phases, told apart under the common colour-vision deficiencies (Okabe and Ito 2008, and
Paul Tol)."""
_TEXT = "#444444"


def categories_figure(
    table: pd.DataFrame, title: str, labels: Mapping[str, str] | None = None, unit: str = "GiB",
    budget: int | None = None,
) -> Figure:  # fmt: skip
    """One stacked bar for each configuration: bytes at the peak by category, in ``GiB`` or (decimal) ``GB``.

    The table has the columns configuration, category and bytes (`grade.memory.tables.categories_table`). Configurations
    are drawn from top to bottom, under the names of ``labels``. Categories under 0.5 % of the largest peak have no
    name. A line stands at ``budget`` bytes.
    """
    wide = table.pivot_table("bytes", "configuration", "category", "sum", fill_value=0, sort=False) / UNITS[unit]
    totals = wide.sum(axis=1)
    colors = [_COLORS[category] for category in wide]
    hidden = {name: f"_{name}" for name in wide if wide[name].max() <= 0.005 * totals.max()}
    fig, ax = plt.subplots(figsize=(9, 1.6 + 0.32 * len(wide)))
    wide = wide.rename(index=labels or {}, columns=hidden)
    wide.plot.barh(stacked=True, ax=ax, color=colors, width=0.7, legend=False)
    ax.bar_label(ax.containers[-1], [f"{x:.1f}" if x >= 10 else f"{x:.2f}" for x in totals], padding=4, fontsize=9)
    if budget is not None:
        ax.axvline(budget / UNITS[unit], color=_TEXT, linestyle="--", linewidth=1)
        where = budget / UNITS[unit], len(wide) - 0.6
        ax.annotate(f"{budget / UNITS[unit]:.0f} {unit} ", where, ha="right", fontsize=9)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.grid(False, axis="y")
    ax.set(title=title, xlabel=f"bytes at the peak, {unit} (traced)", ylabel="")
    fig.legend(loc="outside lower center", ncols=6)  # of the figure: the axes may be narrow beside long names
    return fig


def timelines_figure(table: pd.DataFrame, titles: Sequence[str], unit: str = "GiB", title: str = "") -> Figure:
    """Live bytes over the allocations of one step of each configuration, phases in their colours; equal axes from 0.

    The table has the columns configuration, phase and bytes (`grade.memory.tables.timelines_table`); ``titles`` are one
    for each configuration.
    """
    fig, axes = plt.subplots(1, len(titles), figsize=(9, 3.8), sharey=True)
    for ax, name, (_, rows) in zip(axes, titles, table.groupby("configuration", sort=False), strict=True):
        live = rows.bytes.to_numpy() / UNITS[unit]
        for phase in rows.phase.unique():
            ax.plot(np.where(rows.phase == phase, live, np.nan), color=_COLORS[phase], label=phase, linewidth=1.2)
        ax.set(title=name, xlabel="one optimizer step, in order of its allocations", ylim=(0, None))
        ax.set_xticks([])  # places in a step, of which long ones are thinned out
        ax.legend()
    axes[0].set_ylabel(f"live bytes, {unit} (traced)")
    if title:
        fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    return fig
