"""Figures of the quality of gradients, from the experiment's tables."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullFormatter

from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS
from grade.plotting import SERIES, color

_LINES = ("-", (0, (4, 1.5)), (0, (1, 1)), "-.", (0, (7, 3)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = "osv^DPX<h"
_WIDTH = 7.0  # inches: 1,120 pixels as saved


def label(name: str) -> str:
    """An estimator for people: what its short id in the tables says, in words.

    K is the size of the perturbed support; hops are feedback hops, of which there are none if none are mentioned.

    >>> label("gumbel_rao_m8_tau1_hops0"), label("ste_tau0.5_k64_hops1"), label("rloo")
    ('gumbel_rao, 8 draws, tau 1', 'ste, tau 0.5, K 64, 1 hop', 'rloo')
    """
    settings = re.fullmatch(r"(\w+?)(?:_m(\d+))?(?:_tau([\d.]+))?(?:_k(\d+))?(?:_hops(\d+))?", name)
    if settings is None:
        return name
    estimator, draws, tau, support, hops = settings.groups()
    parts = [estimator, draws and _count(draws, "draw"), tau and f"tau {tau}", support and f"K {support}",
             hops and hops != "0" and _count(hops, "hop")]  # fmt: skip
    return ", ".join(part for part in parts if part)


def family(name: str) -> str:
    """The estimator without its settings.

    >>> family("gumbel_rao_m8_tau1_hops0"), family("rloo")
    ('gumbel_rao', 'rloo')
    """
    return label(name).split(",")[0]


def bias_variance_figure(table: pd.DataFrame, rewards: Sequence[str], batch: int) -> Figure:
    """`plot_bias_variance` for each reward side by side, with one legend."""
    shown = table[(table.estimator != "reinforce") & table.reward.isin(rewards)]
    height = 1.7 + 0.19 * (shown.estimator.nunique() + shown.estimator.map(family).nunique() / 2)
    fig, axes = plt.subplots(1, len(rewards), figsize=(_WIDTH, height), sharex=True, sharey=True, squeeze=False)
    for ax, reward in zip(axes[0], rewards, strict=True):
        plot_bias_variance(ax, shown[shown.reward == reward], batch).set_title(f"reward {reward}", fontsize=10)
        ax.set_xlabel(f"squared error / |gradient|²,\nmean of {batch} samples", fontsize=9)
    _title(fig, "Relaxed gradients are biased, policy gradients only noisy")
    grey = color("text")
    handles = [Patch(color=grey, label="squared bias (bar: two standard errors)"),
               Patch(color=grey, alpha=0.4, label=f"variance of {batch} samples"),
               Line2D([], [], color=color("line"), linewidth=1, linestyle="--", label="a gradient of 0")]  # fmt: skip
    fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return fig


def plot_bias_variance(ax: Axes, table: pd.DataFrame, batch: int = 1) -> Axes:
    """Squared bias and variance over the squared gradient, end to end: the mean squared error of a batch.

    The axes; settings of one estimator are next to each other, with a gap to the next one.
    """
    rows = pd.concat([rows for _, rows in table.groupby(table.estimator.map(family), sort=False)])
    families = rows.estimator.map(family)
    gaps = (families != families.shift()) & ~families.isin(POLICY_GRADIENTS)
    y = -(np.arange(len(rows)) + 0.6 * gaps.cumsum().to_numpy())
    colors = [color(name) for name in rows.estimator]
    bias2 = rows.bias2.clip(lower=0)
    ax.barh(y, bias2, color=colors)
    ax.barh(y, rows.variance / batch, left=bias2, color=colors, alpha=0.4)
    ax.errorbar(bias2, y, xerr=2 * rows.bias2_stderr, fmt="none", ecolor=color("text"), elinewidth=1, capsize=2)
    ax.set_yticks(y, [label(name) for name in rows.estimator], fontsize=8)
    ax.tick_params(axis="x", labelsize=9)
    ax.set_ylim(y.min() - 0.8, 0.8)
    ax.set_xlim(left=0)
    ax.grid(False, axis="y")
    ax.axvline(1, color=color("line"), linewidth=1, linestyle="--")
    return ax


def cosine_figure(
    curves: pd.DataFrame, rewards: Sequence[str], banded: Sequence[str], crossovers: Mapping[tuple[str, str], float]
) -> Figure:
    """`plot_cosines` for each policy and reward, with one legend.

    The figure, at most three panels wide.
    """
    panels = list(itertools.product(curves.policy.unique(), rewards))
    columns = 2 if len(rewards) <= 2 else 3
    lines = -(-len(panels) // columns)
    names = list(dict.fromkeys(curves.estimator))
    beside = len(panels) < lines * columns  # the legend in the free panel, or else below
    height = 2.5 * lines + (0.6 if beside else 0.7 + 0.2 * -(-len(names) // 3))
    fig, axes = plt.subplots(lines, columns, figsize=(_WIDTH, height), sharex=True, sharey=True, squeeze=False)
    styles = line_styles(names)
    for ax, (policy, reward) in zip(axes.flat, panels, strict=False):
        rows = curves[(curves.policy == policy) & (curves.reward == reward)]
        plot_cosines(ax, rows, banded, styles).set_title(f"{reward}, {policy} training", fontsize=10)
        mark_crossover(ax, crossovers.get((policy, reward), 0.0))
    for i, ax in enumerate(axes.flat):
        ax.tick_params(labelsize=9, labelbottom=i + columns >= len(panels))  # the last one of each column
    for ax in axes[-1]:
        ax.set_xlabel("samples (completions)", fontsize=10)
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    shown = curves.cosine.astype(float)
    lowest = shown[np.isfinite(shown)].min()
    axes.flat[0].set_ylim(max(-1.0, lowest) if lowest < 0 else 0.0, 1.0)
    _title(fig, "rloo keeps improving, relaxed gradients level off")
    fig.supylabel("expected cosine with the truth", fontsize=10)
    handles = [Line2D([], [], color=color(name), label=label(name), **styles[name]) for name in names]
    if beside:
        axes.flat[-1].legend(handles=handles, loc="center", fontsize=8, borderaxespad=0)
    else:
        fig.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8.5)
    return fig


def line_styles(names: Sequence[str]) -> dict[str, dict]:
    """Line style and width by estimator: dashes tell its settings apart, thin lines have feedback hops."""
    styles, seen = {}, {}
    for name in names:
        without = re.sub(r"_hops\d+$", "", name)
        known = seen.setdefault(family(name), [])
        if without not in known:
            known.append(without)
        thin = not name.endswith("_hops0") and name not in POLICY_GRADIENTS
        styles[name] = dict(linestyle=_LINES[known.index(without) % len(_LINES)], linewidth=1.0 if thin else 1.8)
    return styles


def plot_cosines(ax: Axes, curves: pd.DataFrame, banded: Sequence[str], styles: Mapping[str, dict]) -> Axes:
    """Expected cosine with the true gradient against the number of samples."""
    for name, rows in curves.groupby("estimator", sort=False):
        ax.plot(rows.n, rows.cosine.astype(float), color=color(str(name)), **styles[str(name)])
        if name in banded and rows.low.notna().all():
            low, high = rows.low.astype(float).clip(-1, 1), rows.high.astype(float).clip(-1, 1)
            ax.fill_between(rows.n, low, high, color=color(str(name)), alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    if not np.isfinite(curves.cosine.astype(float)).any():
        ax.text(0.5, 0.5, "too few batches: truth\nlost in the noise", ha="center", transform=ax.transAxes)
    return ax


def mark_crossover(ax: Axes, batch: float) -> Axes:
    """A vertical line at the batch size where the policy gradient overtakes, if it is on the axis."""
    low, high = ax.get_xlim()
    if np.isfinite(batch) and low < batch < high:
        ax.axvline(batch, color=color("line"), linewidth=1, linestyle=":")
        background = dict(facecolor=ax.get_facecolor(), edgecolor="none", alpha=0.8, pad=1)
        where = dict(fontsize=9, xycoords=("data", "axes fraction"), bbox=background)
        ax.annotate(f"{batch:,.0f} ", (batch, 0.03), color=color("text"), ha="right", **where)
    return ax


def worth_figure(table: pd.DataFrame, rewards: Sequence[str]) -> Figure:
    """`plot_worth` for each policy, one below the other, with one legend."""
    policies = list(table.policy.unique())
    names = _relaxed(table)
    height = 2.6 * len(policies) + 0.6 + 0.2 * -(-len(names) // 3)
    fig, axes = plt.subplots(len(policies), 1, figsize=(_WIDTH, height), sharex=True, squeeze=False)
    for ax, policy in zip(axes[:, 0], policies, strict=True):
        plot_worth(ax, table[table.policy == policy], rewards).set_title(f"{policy} training", fontsize=10)
    axes[-1, 0].set_xlabel("reward" if rewards == ["bag", "trunk"] else "reward (trunk<n>: n layers)", fontsize=10)
    _title(fig, "A relaxed sample is worth most where the reward is shallow")
    fig.supylabel("worth of a sample, in rloo samples", fontsize=10)
    handles, texts = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, texts, loc="outside lower center", ncols=3, fontsize=8.5)
    return fig


def plot_worth(ax: Axes, table: pd.DataFrame, rewards: Sequence[str]) -> Axes:
    """Policy-gradient samples that one sample of each relaxed estimator is worth, with 95 % intervals.

    The axis is logarithmic down to 0.1 and linear to 0 below, since a gradient may be worth nothing; it ends at 300.
    """
    names, seen = _relaxed(table), {}
    for i, name in enumerate(names):
        rows = table[table.estimator == name].set_index("reward").loc[list(rewards)]
        seen[family(name)] = seen.get(family(name), -1) + 1  # settings of one estimator: same colour, other mark
        x = np.arange(len(rewards)) + 0.8 * ((i + 0.5) / len(names) - 0.5)  # side by side
        worth = rows.worth.astype(float)
        ends = [
            (worth - rows.worth_low.astype(float)).clip(lower=0),
            (rows.worth_high.astype(float) - worth).clip(lower=0),
        ]
        ax.errorbar(x, worth, yerr=ends, fmt=_MARKERS[seen[family(name)] % len(_MARKERS)], color=color(name),
                    elinewidth=1, capsize=2, label=label(name))  # fmt: skip
    ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
    ax.set_yticks(ticks := [0, 0.1, 1, 10, 100], [f"{tick:g}" for tick in ticks])
    ax.set_ylim(0, 300)
    ax.set_xticks(range(len(rewards)), rewards)
    ax.set_xlim(-0.5, len(rewards) - 0.5)
    ax.grid(False, axis="x")
    return ax


def hybrid_figure(table: pd.DataFrame, rewards: Sequence[str]) -> Figure:
    """`plot_hybrid` for each policy side by side, with one legend."""
    policies = list(table.policy.unique())
    width = _WIDTH if len(policies) > 1 else 5.6
    fig, axes = plt.subplots(1, len(policies), figsize=(width, 3.8), sharey=True, squeeze=False)
    for ax, policy in zip(axes[0], policies, strict=True):
        plot_hybrid(ax, table[table.policy == policy], rewards).set_title(f"{policy} training", fontsize=10)
    axes[0, 0].set_ylabel("cosine of the blend / the better part's", fontsize=10)
    _title(fig, "For bag, the blend gains nothing over its better part")
    handles, texts = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, texts, title="reward", loc="outside lower center", ncols=len(rewards))
    return fig


def plot_hybrid(ax: Axes, table: pd.DataFrame, rewards: Sequence[str]) -> Axes:
    """Expected cosine of the blend over that of the better of its parts, with 95 % intervals; cut above twice."""
    for i, reward in enumerate(rewards):
        rows = table[table.reward == reward]
        x = rows.n * 1.12 ** (i - (len(rewards) - 1) / 2)  # side by side, or intervals hide each other
        ratio, series = rows.ratio.astype(float), SERIES[i % len(SERIES)]
        ax.plot(x, ratio, _MARKERS[i % len(_MARKERS)] + "-", linewidth=1, color=series, label=reward)
        if rows.low.notna().all():
            ends = [ratio - rows.low.astype(float), rows.high.astype(float) - ratio]
            ax.errorbar(x, ratio, yerr=ends, fmt="none", ecolor=series, elinewidth=1, capsize=3)
    ax.axhline(1, color=color("line"), linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_xticks(sorted(table.n.unique()), [str(n) for n in sorted(table.n.unique())])
    ax.minorticks_off()
    ax.set_xlabel("batch (completions)")
    ax.set_ylim(0, 2)  # an interval that says nothing would squeeze those that do
    return ax


def plot_spread(ax: Axes, table: pd.DataFrame) -> Axes:
    """The paper's "gradient variance" against the variance relative to the squared gradient, both on log axes.

    One point per reward and estimator; settings of one estimator look alike.
    """
    shown = table[np.isfinite(table.relative)]
    markers = dict(zip(shown.reward.unique(), itertools.cycle(_MARKERS), strict=False))
    for row in shown.itertuples():
        ax.plot(row.tensor_spread, row.relative, markers[row.reward], color=color(row.estimator))
    kinds = shown.estimator.map(family).unique()
    handles = [Line2D([], [], linestyle="none", marker="o", color=color(kind), label=kind) for kind in kinds]
    handles += [Line2D([], [], linestyle="none", marker=marker, color=color("neutral"), label=f"reward {reward}")
                for reward, marker in markers.items()]  # fmt: skip
    ax.legend(handles=handles, fontsize=8.5, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.set_title("The paper's variance is not the variance of the gradient")
    ax.set_xlabel("the paper's variance: spread of norms over tensors")
    ax.set_ylabel("variance / |mean gradient|², of a batch")
    return ax


def _title(figure: Figure, text: str) -> None:
    """A title above several panels, on the left as panels' titles are."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=12)


def _relaxed(table: pd.DataFrame) -> list[str]:
    """Relaxed estimators, settings of one next to each other."""
    names = [name for name in table.estimator.unique() if family(name) not in POLICY_GRADIENTS]
    families = list(dict.fromkeys(map(family, names)))
    return sorted(names, key=lambda name: (families.index(family(name)), name))


def _count(number: str, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == "1" else "s")
