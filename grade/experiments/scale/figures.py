"""Figures of the experiment on scale, from its tables."""

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.plotting import GIB, INTERVAL, SERIES, color, panels, with_ends
from grade.experiments.scale.measure.sampling import sampling_ratios
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


def sampling_figure(table: pd.DataFrame) -> Figure | None:
    """Seconds of a completion over TRL's, with 95 % intervals; None if TRL was not timed."""
    ratios = sampling_ratios(table)
    if ratios.empty:
        return None
    shown = with_ends(ratios, "ratio", "ratio_low", "ratio_high").assign(
        completions=lambda rows: rows.batch.astype(str) + " completions"
    )
    many = ratios.batch.nunique()
    best = ratios.loc[ratios.ratio.idxmin()]
    grid = panels(
        sns.catplot, shown, f"At best ({best.sampler}) a completion takes {best.ratio:.2g} times TRL's seconds",
        level=1, kind="point", x="sampler", y="ratio", hue="completions", palette=SERIES[:many],
        dodge=0.3 if many > 1 else False, linestyle="none", capsize=0.1, markersize=6, height=3.2, aspect=1.8,
        err_kws=dict(linewidth=1.5), **INTERVAL,
    )  # fmt: skip
    grid.set(ylabel="seconds per completion over TRL's", xlabel="sampler (own: the default)",
             ylim=(0, 1.1 * shown.ratio.max()), xlim=(-0.6, ratios.sampler.nunique() - 0.4))  # fmt: skip
    return grid.figure
