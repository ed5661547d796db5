"""Figures of the experiment on any reward, from its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.any_reward.learning import main_runs, several_seeds, subject_name
from grade.experiments.any_reward.metrics import best_worths
from grade.experiments.frontier import frontier_table
from grade.plotting import SERIES, color, marker

_WIDTH = 7.0  # inches: 1,120 pixels as saved
_MARKS = "osv^pDPX<h"
_HIGHEST = 1e4  # of an axis of worth: an interval that says nothing would squeeze those that do
_TITLES = {"text": "SmolLM2's trunk, tiny model", "rule": "a rule, tiny model", "sums": "right sums"}


def title_of(name: str) -> str:
    """A subject for people.

    >>> title_of("smollm2_gold"), title_of("tiny_trunk"), title_of("rule")
    ('gold, SmolLM2', 'trunk, tiny model', 'a rule, tiny model')
    """
    policy, _, reward = name.partition("_")
    return _TITLES.get(name, f"{reward}, {'SmolLM2' if policy == 'smollm2' else 'tiny model'}")


def law_figure(table: pd.DataFrame) -> Figure:
    """The gain in variance of the corrected form against the law ``1 / (1 - R2)``, which is the dashed line."""
    fig, ax = plt.subplots(figsize=(5.6, 4.2))
    shown = table[np.isfinite(table["law"]) & (table["law"] > 0)]
    families = shown["family"].unique()
    sns.scatterplot(shown, x="law", y="gain", hue="family", style="family", palette=SERIES[: len(families)],
                    markers=list(_MARKS[: len(families)]), s=45, alpha=0.8, ax=ax)  # fmt: skip
    ends = [min(shown["law"].min(), shown["gain"].min()), max(shown["law"].max(), shown["gain"].max())]
    ax.plot(ends, ends, color=color("line"), linestyle="--", linewidth=1, zorder=0)
    ax.set(xscale="log", yscale="log", xlabel="1 / (1 - R2)", ylabel="variance of rloo / corrected form's")
    ax.set_title("Noise that critics take away, and what they explain")
    return fig


def explained_figure(table: pd.DataFrame) -> Figure:
    """R2 of every reward and number of completions (rows) and family (columns): a panel for each policy and stage."""
    table = table.assign(row=[f"{reward}, n = {n:,}" for reward, n in zip(table["reward"], table["n"], strict=True)])
    stages, policies = table["stage"].unique(), table["policy"].unique()
    rows = {policy: table.loc[table["policy"] == policy, "row"].unique() for policy in policies}
    heights = [len(rows[policy]) for policy in policies]
    fig, axes = plt.subplots(
        len(policies), len(stages), figsize=(_WIDTH, 1.0 + 0.21 * sum(heights) + 0.9 * len(policies)), squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for ax in axes.flat:
        ax.set_axis_off()
    for (policy, stage), cells in table.groupby(["policy", "stage"], sort=False):
        ax = axes[list(policies).index(policy), list(stages).index(stage)]
        ax.set_axis_on()
        wide = cells.pivot(index="row", columns="family", values="r2").reindex(rows[policy])
        sns.heatmap(wide[cells["family"].unique()].astype(float), ax=ax, vmin=0, vmax=1, cmap="viridis", annot=True,
                    fmt=".2f", annot_kws={"fontsize": 7}, cbar=False, linewidths=0.5, yticklabels=True)  # fmt: skip
        ax.set(title=f"{policy}, {stage}", xlabel="", ylabel="")
        ax.tick_params(axis="x", labelsize=8, rotation=45)
        ax.tick_params(axis="y", labelsize=8, rotation=0, labelleft=stage == stages[0])
    _head(fig, "Variance within prompts that each family explains")
    return fig


def worth_figure(table: pd.DataFrame) -> Figure:
    """What one sample of each estimator is worth, alone and in batches, a panel for each size of the batch."""
    best = best_worths(table)
    best = best[best["estimator"] != "rloo"]
    sizes, names = best["n"].unique(), best["label"].unique()
    places = {at: i for i, at in enumerate(dict.fromkeys(zip(best["subject"], best["stage"], strict=True)))}
    fig, axes = plt.subplots(
        len(sizes), 1, figsize=(_WIDTH, 2.5 * len(sizes) + 0.6 + 0.2 * -(-len(names) // 3)), sharex=True, squeeze=False
    )
    for ax, n in zip(axes[:, 0], sizes, strict=True):
        for i, name in enumerate(names):
            own = best[(best["label"] == name) & (best["n"] == n)]
            shift = 0.8 * ((i + 0.5) / len(names) - 0.5)
            x = [places[at] + shift for at in zip(own["subject"], own["stage"], strict=True)]
            bars = (own[["low", "high"]].astype(float).T - own["worth"]).abs().fillna(0)  # no interval: no bar
            ax.errorbar(x, own["worth"], yerr=bars, fmt=_MARKS[i % len(_MARKS)], elinewidth=1, capsize=2, label=name,
                        color=color(name.replace("plugin", "plug_in")))  # fmt: skip
        ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ax.set_yticks(ticks := [0, 0.1, 1, 10, 100, 1000], [f"{tick:g}" for tick in ticks])
        ax.set(ylim=(0, _HIGHEST), xlim=(-0.5, len(places) - 0.5))
        ax.set_title("one sample" if n == 1 else f"a sample in a batch of {n}", fontsize=10)
        ax.grid(False, axis="x")
    axes[-1, 0].set_xticks(range(len(places)), [title_of(name) for name, _ in places])
    _head(fig, "What one sample is worth, in samples of rloo")
    fig.supylabel("worth (bars: 95 %)", fontsize=10)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8.5)
    return fig


def learning_figure(runs: pd.DataFrame, target: float, x: str = "samples") -> Figure:
    """Held-out reward along training and KL beside it, a line of panels for each subject; bands: one standard error.

    ``x``: ``samples``, or ``seconds`` where the runs have a column of these.
    """
    parts = []
    for name, rows in main_runs(runs[runs["target_kl"] == target]).items():
        rows = rows.assign(x=rows.groupby(["method", "step"])[x].transform("mean"))
        subject = f"{title_of(name)} ({rows['seed'].nunique()} seeds)"
        parts += [rows[["method", "x"]].assign(value=rows[column], what=what, subject=subject)
                  for column, what in (("reward", "held-out reward"), ("kl", "KL, nats a completion"))]  # fmt: skip
    table = pd.concat(parts, ignore_index=True)
    grid = sns.relplot(table, x="x", y="value", row="subject", col="what", kind="line", errorbar="se", height=2.3,
                       aspect=1.7, facet_kws=dict(sharex="row", sharey=False), **_methods(table["method"]))  # fmt: skip
    for (subject, what), ax in grid.axes_dict.items():
        ax.set(title=subject if what == "held-out reward" else "", ylabel=what)
    for ax in grid.axes[:, 1]:
        ax.axhline(target, color=color("line"), linewidth=1, linestyle="--")
    grid.set_xlabels("completions" if x == "samples" else "seconds of training")
    return _finished(grid, f"Reward and KL against {'samples' if x == 'samples' else 'time'}; dashed: the target")


def frontier_figure(runs: pd.DataFrame, levels: Sequence[float]) -> Figure | None:
    """Highest held-out reward at each KL up to the highest level, a panel for each subject; bands: one standard error.

    None if no method has two seeds.
    """
    grid_of_kl = list(np.linspace(0, max(levels), 41)[1:])
    tables = [frontier_table(rows, grid_of_kl, "target_kl").assign(subject=title_of(name))
              for name, of_subject in main_runs(runs).items() if len(rows := several_seeds(of_subject))]  # fmt: skip
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    band = pd.concat([table.assign(reward=table["reward"] + sign * table["stderr"]) for sign in (-1, 0, 1)])
    grid = sns.relplot(band, x="kl", y="reward", col="subject", col_wrap=min(2, len(tables)), kind="line", height=2.8,
                       aspect=1.3, errorbar=("pi", 100), facet_kws=dict(sharey=False),
                       **_methods(table["method"]) | {"style": None})  # fmt: skip
    grid.set_titles("{col_name}").set_axis_labels("KL, nats a completion", "held-out reward")
    return _finished(grid, "The highest reward at each KL")


def batches_figure(ratios: pd.DataFrame) -> Figure | None:
    """Samples to `rloo`'s final reward over its own, of `auto`, against completions per step.

    From `learning.ratio_table` at one target; None if no subject has several sizes.
    """
    table = ratios[(ratios["method"] == "auto") & (ratios["n"] > 0)]
    table = table[table.groupby("subject")["completions"].transform("nunique") > 1]
    if table.empty:
        return None
    table = table.assign(subject=table["subject"].map(title_of))
    fig, ax = plt.subplots(figsize=(5.6, 3.8))
    names = table["subject"].unique()
    sns.lineplot(table, x="completions", y="ratio", hue="subject", style="subject", dashes=False, ax=ax,
                 markers=list(_MARKS[: len(names)]), palette=SERIES[: len(names)])  # fmt: skip
    ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    ax.set(xscale="log", yscale="log", xlabel="completions a step", ylabel="samples of auto / of rloo")
    sizes = sorted(table["completions"].unique())
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.legend(title=None)
    ax.set_title("How few samples a step suffice")
    return fig


def tokens_figure(table: pd.DataFrame, shown: int = 12) -> Figure | None:
    """Tokens that a distilled reward likes most and least, so many at either end; None for an empty table."""
    if table.empty:
        return None
    rows = table[table["rank"].abs() <= shown].sort_values("value", ascending=False)
    rows = rows.assign(
        token=rows["token"].astype(str).str.replace("$", r"\$"), good=rows["value"] > 0,
        subject=[title_of(subject_name(*pair)) for pair in zip(rows["policy"], rows["reward"], strict=True)],
    )  # fmt: skip
    grid = sns.catplot(rows, x="value", y="token", hue="good", col="subject", kind="bar", sharex=False, sharey=False,
                       palette={True: color("good"), False: color("bad")}, legend=False, errorbar=None, aspect=0.6,
                       col_order=[title_of(subject_name(*pair)) for pair in
                                  table[["policy", "reward"]].drop_duplicates().itertuples(index=False)],
                       height=0.22 * 2 * shown + 1.0)  # fmt: skip
    grid.set_titles("{col_name}").set_axis_labels("change in the completion's reward", "").tick_params("y", labelsize=8)
    for ax in grid.axes.flat:
        ax.grid(False, axis="y")
    return _finished(grid, "Tokens that the reward likes most and least")


def _methods(methods: Iterable[str]) -> dict[str, Any]:
    """One colour and one marker for each method."""
    order = list(dict.fromkeys(methods))
    return dict(hue="method", style="method", hue_order=order, style_order=order, dashes=False,
                palette={m: color(m) for m in order}, markers={m: marker(m) for m in order})  # fmt: skip


def _finished(grid: sns.FacetGrid, title: str) -> Figure:
    fig = grid.figure
    fig.set_layout_engine("constrained")  # seaborn sets another, which leaves no room for a title
    if grid.legend is not None:
        handles, names = grid.legend.legend_handles, [text.get_text() for text in grid.legend.get_texts()]
        grid.legend.remove()
        fig.legend(handles, names, loc="outside lower center", ncols=6, fontsize=8.5)
    _head(fig, title)
    return fig


def _head(fig: Figure, title: str) -> None:
    fig.suptitle(title, x=0.01, ha="left", fontsize=12)
