"""Figures of experiment 4."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from grade.experiments.exp4.measure.steps import LABELS
from grade.plotting import plot_categories, plot_timelines

_OFF_SCALE = 1.2  # a bar longer than this times the start's would hide all others


def plot_configurations(ax: Axes, categories: pd.DataFrame, budget: int) -> Axes:
    """Bytes at the peak by category, one bar per configuration, those far beyond the start left out."""
    peaks = categories.groupby("configuration", sort=False)["bytes"].sum()
    shown = peaks.index[peaks <= _OFF_SCALE * peaks["start"]]
    table = labelled(categories[categories.configuration.isin(shown)])
    plot_categories(ax, table, budget if peaks["start"] > budget / 4 else None)
    ax.set_title("Checkpointing saves most, replay nearly all")
    return ax


def plot_loop_and_replay(axes: Sequence[Axes], timelines: pd.DataFrame) -> None:
    """Live bytes over one step of the re-running loop and of the replay."""
    plot_timelines(axes, labelled(timelines))
    for ax, title in zip(axes, ("The loop keeps every pass until backward", "Replay keeps one pass"), strict=True):
        ax.set_title(title)


def labelled(table: pd.DataFrame) -> pd.DataFrame:
    """A table with its configurations called as figures call them."""
    return table.assign(configuration=table.configuration.map(LABELS))
