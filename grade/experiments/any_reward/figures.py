"""Figures of the experiment on any reward, from its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grade.experiments.any_reward import learning
from grade.experiments.any_reward.metrics import best_worths, main_runs, subject_name, worth_label
from grade.experiments.frontier import frontier_table
from grade.plotting import SERIES, color, marker

_WIDTH = 7.0  # inches: 1,120 pixels as saved
_MARKS = "osv^pDPX<h"
_HIGHEST = 1e4  # of an axis of worth: an interval that says nothing would squeeze those that do
_TITLES = {
    "text": "SmolLM2's trunk, tiny model", "rule": "a rule, tiny model", "sums": "right sums",
}  # fmt: skip


def title_of(name: str) -> str:
    """A subject for people.

    >>> title_of("smollm2_gold"), title_of("tiny_trunk"), title_of("rule")
    ('gold, SmolLM2', 'trunk, tiny model', 'a rule, tiny model')
    """
    policy, _, reward = name.partition("_")
    return _TITLES.get(name, f"{reward}, {'SmolLM2' if policy == 'smollm2' else 'tiny model'}")


def tint(estimator: str) -> str:
    """The colour of a method or of an estimator of the table of worth."""
    return color(estimator.replace("plugin", "plug_in"))


def law_figure(table: pd.DataFrame) -> Figure:
    """The gain in variance of the corrected form against the law ``1 / (1 - R2)``, which is the dashed line.

    Args:
        table: The table law.

    Returns:
        The figure.
    """
    fig, ax = plt.subplots(figsize=(5.6, 4.2))
    shown = table[np.isfinite(table["law"]) & (table["law"] > 0)]
    for i, (family, rows) in enumerate(shown.groupby("family", sort=False)):
        ax.plot(rows["law"], rows["gain"], _MARKS[i], color=SERIES[i], label=family, alpha=0.8)
    ends = [min(shown["law"].min(), shown["gain"].min()), max(shown["law"].max(), shown["gain"].max())]
    ax.plot(ends, ends, color=color("line"), linestyle="--", linewidth=1, zorder=0)
    ax.set(xscale="log", yscale="log", xlabel="1 / (1 - R2)", ylabel="variance of rloo / corrected form's")
    ax.set_title("Noise that critics take away, and what they explain")
    ax.legend(title="family")
    return fig


def explained_figure(table: pd.DataFrame) -> Figure:
    """R2 of every reward and number of completions (rows) and family (columns): a row of panels for each policy.

    Args:
        table: The table explained.

    Returns:
        The figure; a reward that never differs within a prompt has empty cells.
    """
    policies, stages = (list(table[name].unique()) for name in ("policy", "stage"))
    order = {
        policy: [(reward, n) for reward, of_one in rows.groupby("reward", sort=False) for n in of_one["n"].unique()]
        for policy, rows in table.groupby("policy", sort=False)
    }
    heights = [len(order[policy]) for policy in policies]
    fig, axes = plt.subplots(
        len(policies), len(stages), figsize=(_WIDTH, 1.0 + 0.21 * sum(heights) + 0.9 * len(policies)), squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    for policy, line in zip(policies, axes, strict=True):
        for stage, ax in zip(stages, line, strict=True):
            rows = table[(table["policy"] == policy) & (table["stage"] == stage)]
            if rows.empty:
                ax.set_axis_off()
                continue
            wide = rows.set_index(["reward", "n", "family"])["r2"].unstack("family")
            wide = wide.reindex(order[policy])[list(rows["family"].unique())].astype(float)
            sns.heatmap(wide, ax=ax, vmin=0, vmax=1, cmap="viridis", annot=True, fmt=".2f", annot_kws={"fontsize": 7},
                        cbar=False, linewidths=0.5,
                        yticklabels=[f"{reward}, n = {n:,}" for reward, n in order[policy]])  # fmt: skip
            ax.set(title=f"{policy}, {stage}", xlabel="", ylabel="")
            ax.tick_params(axis="x", labelsize=8, rotation=45)
            ax.tick_params(axis="y", labelsize=8, rotation=0, labelleft=stage == stages[0])
    fig.suptitle("Variance within prompts that each family explains", x=0.01, ha="left", fontsize=12)
    return fig


def worth_figure(table: pd.DataFrame) -> Figure:
    """What one sample of each estimator is worth, alone and in batches, a panel for each size of the batch.

    Args:
        table: The table worth; of distilled rewards the additive family that explains most is shown.

    Returns:
        The figure.
    """
    best = best_worths(table)
    best = best[best["estimator"] != "rloo"]
    sizes = list(best["n"].unique())
    labels = [worth_label(row.estimator, row.fitted, row.weight) for row in best.itertuples()]
    names = list(dict.fromkeys(labels))
    subjects = [(subject_name(row.policy, row.reward), row.stage) for row in best.itertuples()]
    places = {subject: i for i, subject in enumerate(dict.fromkeys(subjects))}
    fig, axes = plt.subplots(
        len(sizes), 1, figsize=(_WIDTH, 2.5 * len(sizes) + 0.6 + 0.2 * -(-len(names) // 3)), sharex=True, squeeze=False
    )
    for ax, n in zip(axes[:, 0], sizes, strict=True):
        for i, name in enumerate(names):
            own = [(places[at], row) for at, label, row in zip(subjects, labels, best.itertuples(), strict=True)
                   if label == name and row.n == n]  # fmt: skip
            _plot_worth(ax, own, 0.8 * ((i + 0.5) / len(names) - 0.5), name, _MARKS[i % len(_MARKS)])
        ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ax.set_yticks(ticks := [0, 0.1, 1, 10, 100, 1000], [f"{tick:g}" for tick in ticks])
        ax.set(ylim=(0, _HIGHEST), xlim=(-0.5, len(places) - 0.5))
        ax.set_title("one sample" if n == 1 else f"a sample in a batch of {n}", fontsize=10)
        ax.grid(False, axis="x")
    axes[-1, 0].set_xticks(range(len(places)), [title_of(name) for name, _ in places])
    fig.suptitle("What one sample is worth, in samples of rloo", x=0.01, ha="left", fontsize=12)
    fig.supylabel("worth (bars: 95 %)", fontsize=10)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8.5)
    return fig


def _plot_worth(ax: Axes, rows: Sequence, shift: float, name: str, mark: str) -> None:
    x = [place + shift for place, _ in rows]
    worth = np.array([row.worth for _, row in rows], float)
    ends = np.array([[row.low, row.high] for _, row in rows], float).reshape(-1, 2).T
    bars = np.nan_to_num(np.abs(ends - worth))  # no interval: no bar
    ax.errorbar(x, worth, yerr=bars, fmt=mark, color=tint(name), elinewidth=1, capsize=2, label=name)


def learning_figure(runs: pd.DataFrame, target: float, x: str = "samples") -> Figure:
    """Held-out reward along training, KL beside it, a line of panels for each subject.

    Args:
        runs: The table runs; with a column ``seconds`` for ``x = "seconds"``.
        target: For KL.
        x: ``samples`` or ``seconds``.

    Returns:
        The figure; bands are one standard error over seeds.
    """
    curves = {name: rows[rows["target_kl"] == target] for name, rows in main_runs(runs).items()}
    curves = {name: rows.assign(seconds=rows.get("seconds", np.nan)) for name, rows in curves.items() if len(rows)}
    fig, axes = plt.subplots(len(curves), 2, figsize=(_WIDTH + 1, 2.3 * len(curves) + 0.9), squeeze=False)
    for (left, right), (name, rows) in zip(axes, curves.items(), strict=True):
        for method, points in learning.learning_table(rows).groupby("method", sort=False):
            style = dict(color=color(method), linewidth=1.6, markersize=4)
            left.plot(points[x], points["reward"], marker(method) + "-", label=method, **style)
            error = points["reward_stderr"].fillna(0)
            left.fill_between(points[x], points["reward"] - error, points["reward"] + error, color=color(method),
                              alpha=0.15, linewidth=0)  # fmt: skip
            right.plot(points[x], points["kl"], marker(method) + "-", **style)
        right.axhline(target, color=color("line"), linewidth=1, linestyle="--")
        left.set_title(f"{title_of(name)} ({rows['seed'].nunique()} seeds)", fontsize=10)
        left.set_ylabel("held-out reward", fontsize=9)
        right.set_ylabel("KL, nats a completion", fontsize=9)
    for ax in axes[-1]:
        ax.set_xlabel("completions" if x == "samples" else "seconds of training")
    words = "samples" if x == "samples" else "time"
    fig.suptitle(f"Reward and KL against {words}; dashed: the target", x=0.01, ha="left", fontsize=12)
    _legend(fig, [method for rows in curves.values() for method in rows["method"].unique()])
    return fig


def frontier_figure(runs: pd.DataFrame, levels: Sequence[float]) -> Figure | None:
    """Highest held-out reward at each KL, a panel for each subject.

    Args:
        runs: The table runs.
        levels: KL in nats a completion that the figure is to hold.

    Returns:
        The figure; bands are one standard error. None if no method has two seeds.
    """
    tables: dict[str, pd.DataFrame] = {}
    for name, rows in main_runs(runs).items():
        seeds = rows.groupby("method")["seed"].nunique()
        rows = rows[rows["method"].isin(seeds.index[seeds > 1])]
        if len(rows):
            tables[name] = frontier_table(rows, list(np.linspace(0, max(levels), 41)[1:]), "target_kl")
    if not tables:
        return None
    columns = min(2, len(tables))
    lines = -(-len(tables) // columns)
    fig, axes = plt.subplots(lines, columns, figsize=(_WIDTH, 2.6 * lines + 0.8), squeeze=False)
    for ax, (name, table) in zip(axes.flat, tables.items(), strict=False):
        for method, rows in table.groupby("method", sort=False):
            ax.plot(rows["kl"], rows["reward"], color=color(method), linewidth=1.6)
            ax.fill_between(rows["kl"], rows["reward"] - rows["stderr"], rows["reward"] + rows["stderr"],
                            color=color(method), alpha=0.15, linewidth=0)  # fmt: skip
        ax.set_title(title_of(name), fontsize=10)
    for ax in list(axes.flat)[len(tables) :]:
        ax.set_axis_off()
    fig.suptitle("The highest reward at each KL", x=0.01, ha="left", fontsize=12)
    for ax in axes.flat[max(len(tables) - columns, 0) : len(tables)]:  # a label below all would lie on the legend
        ax.set_xlabel("KL, nats a completion", fontsize=9)
    fig.supylabel("held-out reward", fontsize=10)
    _legend(fig, [method for table in tables.values() for method in table["method"].unique()])
    return fig


def batches_figure(ratios: Mapping[str, pd.Series]) -> Figure | None:
    """Samples to `rloo`'s final reward over its own, against completions a step.

    Args:
        ratios: By subject, a series by completions a step.

    Returns:
        The figure; None if there is one size only.
    """
    ratios = {name: values for name, values in ratios.items() if len(values) > 1}
    if not ratios:
        return None
    fig, ax = plt.subplots(figsize=(5.6, 3.8))
    for i, (name, values) in enumerate(ratios.items()):
        ax.plot(values.index, values, _MARKS[i] + "-", color=SERIES[i], label=title_of(name))
    ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    ax.set(xscale="log", yscale="log", xlabel="completions a step", ylabel="samples of auto / of rloo")
    sizes = sorted({size for values in ratios.values() for size in values.index})
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.minorticks_off()
    ax.set_title("How few samples a step suffice")
    ax.legend()
    return fig


def tokens_figure(table: pd.DataFrame, shown: int = 12) -> Figure | None:
    """Tokens that a distilled reward likes most and least, as text, a panel for each reward.

    Args:
        table: The table tokens.
        shown: Tokens at either end.

    Returns:
        The figure; None for an empty table.
    """
    panels = list(table.groupby(["policy", "reward"], sort=False))
    if not panels:
        return None
    fig, axes = plt.subplots(
        1, len(panels), figsize=(max(3.2 * len(panels) + 1.0, 5.6), 0.22 * 2 * shown + 1.0), squeeze=False
    )  # fmt: skip
    for ax, ((policy, reward), rows) in zip(axes[0], panels, strict=True):
        rows = rows[rows["rank"].abs() <= shown].sort_values("value", ascending=False)
        names = [str(token).replace("$", r"\$") for token in rows["token"]]
        ax.barh(range(len(rows)), rows["value"], color=[color("good" if v > 0 else "bad") for v in rows["value"]])
        ax.set_yticks(range(len(rows)), names, fontsize=8)
        ax.invert_yaxis()
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.grid(False, axis="y")
        ax.set_title(title_of(subject_name(policy, reward)), fontsize=10)
    fig.suptitle("Tokens that the reward likes most and least", x=0.01, ha="left", fontsize=12)
    fig.supxlabel("change in the completion's reward", fontsize=10)
    return fig


def _legend(fig: Figure, methods: Sequence[str]) -> None:
    handles = [Line2D([], [], color=color(m), marker=marker(m), markersize=4, label=m) for m in dict.fromkeys(methods)]
    fig.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=8.5)
