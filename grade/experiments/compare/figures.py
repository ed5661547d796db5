"""Figures of the training comparison; every function draws on Axes and returns them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from grade.gradients.methods import RELAXED
from grade.plotting import color, marker

_SMALL = 9.5
_FAMILIES = ("relaxed gradients", "policy gradients")


def frontier_levels(kl_levels: Sequence[float], n: int = 60) -> list[float]:
    """A grid of KL for `plot_frontier`: a fifth beyond the table's largest level, with all of its levels on it.

    >>> frontier_levels([2.0, 5.0], n=3)
    [2.0, 4.0, 5.0, 6.0]
    """
    grid = np.linspace(0, 1.2 * max(kl_levels), n + 1)[1:]
    return sorted({*(round(float(x), 9) for x in grid), *map(float, kl_levels)})


def plot_frontier(axes: Sequence[Axes], table: pd.DataFrame, kl_levels: Sequence[float]) -> Sequence[Axes]:
    """Highest held-out reward at each KL: relaxed methods on the left, policy gradients on the right.

    The lines are what the table of rewards at equal KL is read from, with dots at its levels: no straight segment
    between two evaluations, but the mean over seeds of the best mixture of two policies. Bands are one standard error.
    The other panel's methods are behind, in grey.

    Returns:
        ``axes``.
    """
    methods = list(dict.fromkeys(table["method"]))
    for ax, family, title in zip(axes, _split(methods), _FAMILIES, strict=True):
        for method in methods:
            rows = table[table["method"] == method]
            if method not in family:
                ax.plot(rows["kl"], rows["reward"], color=color("neutral"), linewidth=0.8, alpha=0.6, zorder=1)
                continue
            at_levels = rows[rows["kl"].isin(kl_levels)]
            ax.plot(rows["kl"], rows["reward"], color=color(method), zorder=2)
            ax.plot(at_levels["kl"], at_levels["reward"], marker(method), color=color(method), markersize=6, zorder=3)
            _band(ax, rows["kl"], rows["reward"], rows["stderr"], method)
        ax.set(title=title, xlabel="KL to the reference, nats a completion", xlim=(0, table["kl"].max()))
        _legend(ax, _by_end(table, family), "-", loc="lower right" if family and family[0] in RELAXED else "upper left")
    axes[0].set_ylabel("held-out reward")
    _head(axes[0], "At equal KL, a relaxed method gets the most reward")
    return axes


def plot_against(ax: Axes, curves: pd.DataFrame, beta: float, x: str = "samples") -> Axes:
    """Held-out reward along training at one weight of KL: mean over seeds, band of one standard error.

    Returns:
        ``ax``.
    """
    curves = curves[curves["beta"] == beta]
    for method, runs in curves.groupby("method", sort=False):
        by_step = runs.groupby("step")
        mean, stderr = by_step["reward"].mean(), by_step["reward"].sem().fillna(0.0)
        at = by_step[x].mean()
        ax.plot(at, mean, color=color(method), marker=marker(method), linestyle=_line(method), markersize=6)
        _band(ax, at, mean, stderr, method)
    seeds = curves["seed"].nunique()
    ax.set_title(
        "Relaxed gradients learn from fewer completions" if x == "samples" else "The same runs against training time"
    )
    ax.set_xlabel("completions generated" if x == "samples" else "training time, seconds")
    ax.set_ylabel(f"held-out reward ({seeds} seeds, ± 1 s.e.)")
    _legend(ax, _by_end(curves, list(dict.fromkeys(curves["method"])), "step"), loc="center left",
            bbox_to_anchor=(1.01, 0.5))  # fmt: skip
    return ax


def plot_gold(axes: Sequence[Axes], curves: pd.DataFrame) -> Sequence[Axes]:
    """Gold judge against trained reward, a dot for each evaluation: relaxed methods, then policy gradients.

    On the dotted line the judge shares every gain; below it the reward is exploited.

    Returns:
        ``axes``.
    """
    start = curves[curves["step"] == 0][["reward", "gold"]].mean()
    methods = list(dict.fromkeys(curves["method"]))
    top = curves["gold"].max() + 0.08 * (curves["gold"].max() - curves["gold"].min())
    for ax, family, title in zip(axes, _split(methods), _FAMILIES, strict=True):
        others = curves[~curves["method"].isin(family)]
        ax.plot(others["reward"], others["gold"], ".", color=color("neutral"), markersize=2.5, alpha=0.5, zorder=1)
        for method, runs in curves[curves["method"].isin(family)].groupby("method", sort=False):
            ax.plot(runs["reward"], runs["gold"], marker(method), color=color(method), markersize=4.5, alpha=0.75,
                    markeredgewidth=0)  # fmt: skip
        ax.plot([start.reward, start.reward + top - start.gold], [start.gold, top], color=color("text"),
                linestyle=":", linewidth=1.2)  # fmt: skip
        ax.annotate("every gain shared", (start.reward + top - start.gold, top), xytext=(-6, -4), ha="right", va="top",
                    textcoords="offset points", color=color("text"), fontsize=8.5)  # fmt: skip
        ax.set(title=title, xlabel="trained reward, held-out prompts")
    axes[0].set_ylabel("gold judge, same completions")
    _legend(axes[0].figure, sum(_split(methods), []), "", loc="outside lower center", ncols=5)
    _head(axes[0], "The gold judge shares a part of every method's gain")
    return axes


def plot_gains(ax: Axes, figures: Mapping[str, float], name: str, methods: Sequence[str], prefix: str = "") -> Axes:
    """One horizontal bar for each method, largest first, with two standard errors over seeds.

    Returns:
        ``ax``.
    """
    means = {method: figures[key] for method in methods if (key := f"{prefix}{name}/{method}") in figures}
    shown = sorted(means, key=means.get, reverse=True)
    errors = [2 * figures.get(f"{prefix}{name}/{method}_stderr", 0.0) for method in shown]
    ax.barh(shown, [means[method] for method in shown], xerr=errors, color=[color(method) for method in shown],
            ecolor=color("text"), error_kw={"elinewidth": 1.2, "capsize": 3}, height=0.68, alpha=0.65)  # fmt: skip
    for y, (method, error) in enumerate(zip(shown, errors, strict=True)):
        ax.annotate(f"{means[method]:.3f}", (max(means[method] + error, 0.0), y), xytext=(5, 0), va="center",
                    textcoords="offset points", fontsize=_SMALL)  # fmt: skip
    ax.margins(x=0.12)
    ax.invert_yaxis()
    ax.axvline(0, color=color("line"), linewidth=0.8)
    ax.grid(axis="y", visible=False)
    ax.set_title(f"{'Other reward: l' if prefix else 'L'}argest mean gain from equal completions: {shown[0]}")
    ax.set_xlabel(f"{name.replace('_', ' ')} in held-out reward (bars: 2 standard errors over seeds)")
    return ax


def _split(methods: Iterable[str]) -> tuple[list[str], list[str]]:
    """Relaxed methods and policy gradients, each in the given order."""
    methods = list(methods)
    return [m for m in methods if m in RELAXED], [m for m in methods if m not in RELAXED]


def _line(method: str) -> str:
    return "-" if method in RELAXED else "--"


def _band(ax: Axes, x: pd.Series, mean: pd.Series, stderr: pd.Series, method: str) -> None:
    low, high = (mean + sign * stderr for sign in (-1, 1))
    ax.fill_between(x, low, high, color=color(method), alpha=0.15, linewidth=0)


def _by_end(table: pd.DataFrame, methods: Sequence[str], order: str = "kl") -> list[str]:
    """Methods by their last reward, highest first: the order of the lines at the right end."""
    last = table[table[order] == table[order].max()].groupby("method")["reward"].mean()
    return sorted(methods, key=lambda method: -last.get(method, 0.0))


def _legend(on: Axes | Figure, methods: Sequence[str], line: str | None = None, **place: object) -> None:
    """A legend of methods, with their own line styles if ``line`` is None."""
    handles = [
        Line2D([], [], color=color(m), marker=marker(m), linestyle=_line(m) if line is None else line, label=m)
        for m in methods
    ]
    if handles:
        on.legend(handles=handles, handlelength=2.6, **place)


def _head(ax: Axes, title: str) -> None:
    """The title of a figure of several panels, left-aligned as those of single ones."""
    ax.figure.suptitle(title, x=0.01, ha="left", fontsize=13)
