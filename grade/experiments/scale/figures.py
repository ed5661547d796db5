"""Figures of the experiment on scale, from its tables."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from grade.experiments.scale.metrics import peer_ratios
from grade.memory.live import CATEGORIES, SHARDED
from grade.plotting import GIB, SERIES, color

_SHARDINGS = {"ddp": "a copy on each (ddp)", "fsdp2": "divided (fsdp2)"}


def gpus_figure(table: pd.DataFrame) -> Figure:
    """Peak of one of several GPUs by category, the base copied and divided."""
    fig, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True)
    for ax, (sharding, title) in zip(axes, _SHARDINGS.items(), strict=True):
        rows = table[table["sharding"] == sharding]
        names, bottom = rows["gpus"].astype(str).tolist(), [0.0] * len(rows)
        for category in (c for c in (*CATEGORIES, *SHARDED) if c in table and table[c].max() > 0):
            sizes = (rows[category].fillna(0) / GIB).tolist()
            ax.bar(names, sizes, bottom=bottom, color=color(category), label=category, width=0.7)
            bottom = [low + size for low, size in zip(bottom, sizes, strict=True)]
        ax.set(title=title, xlabel="GPUs, each with a batch of its own")
    axes[0].set_ylabel("peak of one GPU, GiB")
    handles, labels = axes[1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside right center")
    return fig


def sampling_figure(table: pd.DataFrame) -> Figure | None:
    """Seconds of a completion over TRL's, with 95 % intervals."""
    ratios = peer_ratios(table)
    if ratios.empty:
        return None
    fig, ax = plt.subplots(figsize=(6.4, 3.2))
    names = list(dict.fromkeys(ratios["sampler"]))
    for number, (batch, rows) in enumerate(ratios.groupby("batch", sort=True)):
        places = [names.index(name) + 0.2 * number for name in rows["sampler"]]
        spread = [rows["ratio"] - rows["ratio_low"], rows["ratio_high"] - rows["ratio"]]
        ax.errorbar(places, rows["ratio"], spread, fmt="os^v"[number % 4], color=SERIES[number % len(SERIES)],
                    label=f"{batch} completions", capsize=3)  # fmt: skip
    ax.axhline(1, color=color("line"), linestyle="--", linewidth=1, zorder=0)
    ax.set_xticks([place + 0.1 for place in range(len(names))], names)
    ax.set(ylabel="seconds over TRL's", ylim=(0, None))
    ax.legend()
    return fig
