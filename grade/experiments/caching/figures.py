"""Figures of the experiment on activation caching."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from grade.experiments.caching.measure.options import OPTIONS
from grade.plotting import SERIES, plot_categories, plot_timelines

_PARTS = dict(zip(("attention", "MLP", "norms", "adapter inputs"), SERIES, strict=False))


def plot_layer_groups(ax: Axes, groups: Mapping[str, Mapping[str, float]]) -> Axes:
    """One stacked bar per model: what one layer keeps for backward, by part."""
    left = dict.fromkeys(groups, 0.0)
    for part, series in _PARTS.items():
        sizes = [parts.get(part, 0.0) for parts in groups.values()]
        ax.barh(list(groups), sizes, left=list(left.values()), height=0.6, color=series, label=part)
        left = {name: total + size for (name, total), size in zip(left.items(), sizes, strict=True)}
    for y, total in enumerate(left.values()):
        ax.annotate(f"{total:.3g}", (total, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.invert_yaxis()
    ax.set_title("A layer keeps more than the document counts")
    ax.set_xlabel("kept by one layer for backward, MB")
    ax.set_xlim(0, 1.1 * max(left.values()))
    ax.grid(False, axis="y")
    ax.figure.legend(loc="outside lower center", ncols=4)
    return ax


def plot_options(ax: Axes, categories: pd.DataFrame) -> Axes:
    """Bytes at the peak by category, one bar per option, in decimal GB."""
    plot_categories(ax, _labelled(categories), unit="GB")
    ax.set_title("Only checkpointing lowers the peak")
    return ax


def plot_option_timelines(axes: Sequence[Axes], timelines: pd.DataFrame) -> None:
    """Live bytes over one step without and with checkpointed layers, in decimal GB."""
    plot_timelines(axes, _labelled(timelines), unit="GB")
    for ax, title in zip(axes, ("Selected: the whole graph stays", "Checkpointed: one layer at a time"), strict=True):
        ax.set_title(title)


def plot_layer_differences(ax: Axes, table: pd.DataFrame) -> Axes:
    """Relative difference between the policy's activations and the base's, layer by layer."""
    ax.plot(table.layer, table.relative_difference, marker="o", color=SERIES[0])
    ax.set_title("The adapter changes the activations of every layer")
    ax.set_xlabel("layer")
    ax.set_ylabel("|h policy − h base| / |h base|")
    ax.set_ylim(bottom=0)
    return ax


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(configuration=table.configuration.map(OPTIONS))
