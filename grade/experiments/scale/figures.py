"""Figures of the experiment on scale, from its tables."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from grade.experiments.plotting import GIB, color
from grade.memory.records import CATEGORIES, SHARDED

_SHARDINGS = {"ddp": "a copy on each (ddp)", "fsdp2": "divided (fsdp2)"}


def gpus_figure(table: pd.DataFrame) -> Figure:
    """Peak of one of several GPUs by category, the base copied and divided."""
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    shown = [name for name in (*CATEGORIES, *SHARDED) if name in table and table[name].max() > 0]
    for ax, (sharding, title) in zip(axes, _SHARDINGS.items(), strict=True):
        sizes = table[table.sharding == sharding].set_index("gpus")[shown].fillna(0) / GIB
        sizes.plot.bar(stacked=True, ax=ax, color=[color(name) for name in shown], width=0.7, rot=0, legend=False)
        ax.set(title=title, xlabel="GPUs, each with a batch of its own", ylabel="peak of one GPU, GiB")
    axes[0].set_ylim(0, 1.05 * table.peak.max() / GIB)
    most = table[table.gpus == table.gpus.max()].set_index("sharding").peak / GIB
    title = f"Peak of each of {table.gpus.max()} GPUs: " + ", ".join(
        f"{peak:.1f} GiB {_SHARDINGS[sharding]}" for sharding, peak in most.items()
    )
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
    fig.legend(*axes[1].get_legend_handles_labels(), loc="outside right center")
    return fig
