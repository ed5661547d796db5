"""Figures of the experiment on activation caching."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes


def plot_layer_differences(ax: Axes, table: pd.DataFrame) -> Axes:
    """Relative difference between the policy's activations and the base's, layer by layer.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.caching.options.layer_differences`.

    Returns:
        The axes.
    """
    ax.plot(table.layer, table.relative_difference, marker="o", color="#D55E00")
    ax.set_xlabel("layer")
    ax.set_ylabel("|h policy − h base| / |h base|")
    ax.set_ylim(bottom=0)
    return ax


def plot_layer_groups(ax: Axes, groups: Mapping[str, Mapping[str, float]]) -> Axes:
    """One stacked bar a model: what one layer keeps for backward, by part.

    Args:
        ax: Where to draw.
        groups: For each bar, MB by part; the parts may differ.

    Returns:
        The axes.
    """
    colors = {"attention": "#0072B2", "MLP": "#D55E00", "norms": "#009E73", "adapter inputs": "#CC79A7"}
    for y, parts in enumerate(groups.values()):
        left = 0.0
        for part, size in parts.items():
            first = part not in ax.get_legend_handles_labels()[1]
            ax.barh(y, size, left=left, height=0.6, color=colors.get(part, "#888888"), label=part if first else None)
            left += size
        ax.annotate(f"{left:.0f}", (left, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.invert_yaxis()
    ax.set_xlabel("MB that one layer keeps for backward")
    ax.set_xlim(0, 1.1 * max(sum(parts.values()) for parts in groups.values()))
    ax.grid(False, axis="y")
    ax.figure.legend(loc="outside lower center", ncols=4)
    return ax
