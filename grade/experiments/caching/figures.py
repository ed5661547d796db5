"""Figures of the experiment on activation caching."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.plotting import SERIES

_PARTS = ("attention", "MLP", "norms", "adapter inputs")


def layer_figure(groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """One stacked bar per model: what one layer keeps for backward, in decimal MB by part; a part may be missing."""
    fig, ax = plt.subplots(figsize=(8, 2.8))
    sizes = pd.DataFrame(groups).T.reindex(columns=_PARTS).fillna(0)
    sizes.plot.barh(stacked=True, ax=ax, color=SERIES[: len(_PARTS)], width=0.6, legend=False)
    ax.bar_label(ax.containers[-1], [f"{total:.3g}" for total in sizes.sum(axis=1)], padding=4, fontsize=9)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.grid(False, axis="y")
    ax.set(title="A layer keeps more than the document counts", xlabel="kept by one layer for backward, MB")
    fig.legend(loc="outside lower center", ncols=4)
    return fig


def differences_figure(table: pd.DataFrame) -> Figure:
    """Relative difference between the policy's activations and the base's, layer by layer."""
    fig, ax = plt.subplots(figsize=(6.4, 3.2))
    sns.lineplot(table, x="layer", y="relative_difference", marker="o", ax=ax)
    ax.set(title="The adapter changes the activations of every layer", ylabel="|h policy − h base| / |h base|",
           ylim=(0, None))  # fmt: skip
    return fig
