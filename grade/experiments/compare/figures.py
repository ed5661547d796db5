"""Figures of the training comparison; every function draws on Axes and returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from grade.plotting import METHOD_COLORS, METHOD_MARKERS

# Okabe and Ito's and Paul Tol's colours again; methods that never share a figure with the engines may share theirs.
_COLORS = METHOD_COLORS | {
    "gumbel_rao": "#E69F00",
    "reinmax": "#56B4E9",
    "reinforce": "#999933",
    "rloo": "#332288",
    "remax": "#44AA99",
    "grpo": "#009E73",
    "ppo": "#882255",
    "trl_grpo": "#666666",
}
_MARKERS = METHOD_MARKERS | dict(zip(list(_COLORS)[len(METHOD_COLORS) :], "Xp*d8HP>", strict=True))


def plot_frontier(ax: Axes, curves: pd.DataFrame, untrained: float) -> Axes:
    """Held-out reward against KL: a thin line for each run, a mark at its end.

    Args:
        ax: Where to draw.
        curves: Columns of `grade.experiments.compare.frontier.CURVES`.
        untrained: Reward of the untrained policy, a dotted line.

    Returns:
        ``ax``.
    """
    for method, runs in curves.groupby("method", sort=False):
        color, label = _COLORS.get(method, "#000000"), method
        for _, run in runs.groupby(["beta", "seed"]):
            run = run.sort_values("step")
            ax.plot(run["kl"], run["reward"], color=color, linewidth=0.7, alpha=0.45)
            ax.plot(run["kl"].iloc[-1:], run["reward"].iloc[-1:], _MARKERS.get(method, "o"), color=color, label=label)
            label = None
    ax.axhline(untrained, color="#777777", linestyle=":", linewidth=1)
    ax.set(xlabel="KL to the reference (nats a completion)", ylabel="held-out reward")
    ax.set_xscale("symlog", linthresh=1)
    ax.set_xlim(left=0)
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return ax


def plot_against(axes: Sequence[Axes], curves: pd.DataFrame, beta: float) -> Sequence[Axes]:
    """Held-out reward against samples and against seconds at one beta: mean over seeds, band of one standard error.

    Args:
        axes: Two Axes.
        curves: Columns of `grade.experiments.compare.frontier.CURVES`.
        beta: Weight of KL.

    Returns:
        ``axes``.
    """
    for method, runs in curves[curves["beta"] == beta].groupby("method", sort=False):
        by_step = runs.groupby("step")
        mean, stderr = by_step["reward"].mean(), by_step["reward"].sem().fillna(0.0)
        color = _COLORS.get(method, "#000000")
        for ax, column in zip(axes, ("samples", "seconds"), strict=True):
            x = by_step[column].mean()
            ax.plot(x, mean, color=color, marker=_MARKERS.get(method, "o"), markersize=4, label=method)
            ax.fill_between(x, mean - stderr, mean + stderr, color=color, alpha=0.15, linewidth=0)
            ax.set(xlabel="completions" if column == "samples" else "training time (seconds)", ylabel="held-out reward")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return axes


def plot_gold(ax: Axes, curves: pd.DataFrame, untrained: Mapping[str, float]) -> Axes:
    """Gold judge against trained reward, a dot for each evaluation; off the diagonal the reward is exploited.

    Args:
        ax: Where to draw.
        curves: Columns of `grade.experiments.compare.frontier.CURVES`.
        untrained: ``reward`` and ``gold`` of the untrained policy.

    Returns:
        ``ax``.
    """
    for method, runs in curves.groupby("method", sort=False):
        ax.plot(runs["reward"], runs["gold"], _MARKERS.get(method, "o"), color=_COLORS.get(method, "#000000"),
                markersize=3.5, alpha=0.6, label=method)  # fmt: skip
    ax.axline((untrained["reward"], untrained["gold"]), slope=1, color="#777777", linestyle=":", linewidth=1)
    ax.set(xlabel="trained reward, held-out prompts", ylabel="gold judge")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return ax


def plot_gains(ax: Axes, figures: Mapping[str, float], name: str, methods: Sequence[str], prefix: str = "") -> Axes:
    """One horizontal bar for each method with two standard errors over seeds.

    Args:
        ax: Where to draw.
        figures: Metrics ``<prefix><name>/<method>`` with ``_stderr``.
        name: ``gain`` or ``gold_gain``.
        methods: Top to bottom; those without a figure are left out.
        prefix: Put before the name.

    Returns:
        ``ax``.
    """
    shown = [m for m in methods if f"{prefix}{name}/{m}" in figures]
    values = [figures[f"{prefix}{name}/{m}"] for m in shown]
    errors = [2 * figures.get(f"{prefix}{name}/{m}_stderr", 0.0) for m in shown]
    ax.barh(shown, values, xerr=errors, color=[_COLORS.get(m, "#000000") for m in shown], height=0.68)
    ax.invert_yaxis()
    ax.axvline(0, color="#333333", linewidth=0.8)
    ax.grid(axis="y", visible=False)
    ax.set(xlabel=f"{name.replace('_', ' ')} (bars: 2 standard errors over seeds)")
    return ax
