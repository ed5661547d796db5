"""Figures of the quality of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter

from grade.plotting import METHOD_COLORS

_COLORS = {name: METHOD_COLORS[name] for name in ("ste", "gumbel")} | {"gumbel_rao": "#009E73", "reinmax": "#CC79A7"}
_POLICY = "#444444"
_LINES = ("-", "-.", (0, (3, 1, 1, 1, 1, 1)), (0, (5, 1)), (0, (1, 1)), (0, (7, 3)))


def estimator_color(name: str) -> str:
    """Colour of an estimator, whatever its settings; policy gradients are grey.

    >>> estimator_color("gumbel_rao_m8_tau1_hops0"), estimator_color("rloo")
    ('#009E73', '#444444')
    """
    known = [key for key in _COLORS if name.startswith(f"{key}_") or name == key]
    return _COLORS[max(known, key=len)] if known else _POLICY


def plot_bias_variance(ax: Axes, table: pd.DataFrame, batch: int = 1) -> Axes:
    """Squared bias and variance over the squared gradient, on top of each other: the mean squared error of a batch.

    Args:
        ax: Where to draw.
        table: Rows of one reward from `grade.experiments.estimators.enumerated.quality_table`.
        batch: Samples in the batch.

    Returns:
        The axes.
    """
    rows, y = table.iloc[::-1], np.arange(len(table))
    colors = [estimator_color(name) for name in rows.estimator]
    bias2 = rows.bias2.clip(lower=0)
    ax.barh(y, bias2, color=colors, label="squared bias")
    ax.barh(y, rows.variance / batch, left=bias2, color=colors, alpha=0.4, label=f"variance of {batch} samples")
    ax.errorbar(bias2, y, xerr=2 * rows.bias2_stderr, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    ax.set_yticks(y, rows.estimator, fontsize=8)
    ax.set_xlabel(f"mean squared error over |gradient|², batch of {batch}")
    ax.axvline(1, color="#888888", linewidth=1, linestyle="--")  # what no gradient at all has
    return ax


def plot_cosines(ax: Axes, curves: pd.DataFrame, banded: Sequence[str] = ()) -> Axes:
    """Expected cosine with the true gradient against the number of samples.

    Args:
        ax: Where to draw.
        curves: From `grade.experiments.estimators.study.cosine_curves`.
        banded: Estimators that get a 95 % band.

    Returns:
        The axes.
    """
    seen: dict[str, int] = {}
    for name, rows in curves.groupby("estimator", sort=False):
        color = estimator_color(str(name))
        seen[color] = seen.get(color, -1) + 1  # settings of one estimator: same colour, other line
        style = "--" if color == _POLICY else _LINES[seen[color] % len(_LINES)]
        ax.plot(rows.n, rows.cosine, color=color, linestyle=style, label=name)
        if name in banded and rows.low.notna().all():
            low, high = rows.low.astype(float).clip(-1, 1), rows.high.astype(float).clip(-1, 1)
            ax.fill_between(rows.n, low, high, color=color, alpha=0.15, linewidth=0)
    ax.set_xscale("log")
    shown = curves.cosine[np.isfinite(curves.cosine.astype(float))]
    ax.set_ylim(max(-1.0, min(0.0, float(shown.min()))) if len(shown) else 0.0, 1)
    if not len(shown):
        ax.text(0.5, 0.5, "too few batches: truth\nlost in the noise", ha="center", transform=ax.transAxes)
    ax.set_xlabel("samples (completions)")
    ax.set_ylabel("expected cosine with the true gradient")
    ax.legend(fontsize=7.5, loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return ax


def mark_crossover(ax: Axes, batch: float, color: str = "#888888") -> Axes:
    """A vertical line at the batch size where the policy gradient overtakes, if it is on the axis."""
    low, high = ax.get_xlim()
    if np.isfinite(batch) and low < batch < high:
        ax.axvline(batch, color=color, linewidth=1, linestyle=":")
        ax.annotate(f"{batch:,.0f}", (batch, 0.02), color=color, fontsize=9)
    return ax


def plot_worth(ax: Axes, table: pd.DataFrame, rewards: Sequence[str]) -> Axes:
    """Policy-gradient samples that one sample of each relaxed estimator is worth, with 95 % intervals.

    The axis is logarithmic down to 0.1 and linear to 0 below, since a gradient may be worth nothing; it ends at 300.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.estimators.study.summary`; policy gradients are left out.
        rewards: Which, in this order.

    Returns:
        The axes.
    """
    names = [name for name in table.estimator.unique() if estimator_color(name) != _POLICY]
    names.sort(key=lambda name: (list(_COLORS.values()).index(estimator_color(name)), name))
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        rows = table[table.estimator == name].set_index("reward").loc[list(rewards)]
        color = estimator_color(name)
        seen[color] = seen.get(color, -1) + 1  # settings of one estimator: same colour, other marker
        x = np.arange(len(rewards)) + 0.8 * ((i + 0.5) / len(names) - 0.5)  # side by side
        worth = rows.worth.astype(float)
        ends = [
            (worth - rows.worth_low.astype(float)).clip(lower=0),
            (rows.worth_high.astype(float) - worth).clip(lower=0),
        ]
        ax.errorbar(
            x, worth, yerr=ends, fmt="osv^DPX"[seen[color] % 7], color=color, elinewidth=1, capsize=2, label=name
        )
    ax.axhline(1, color="#888888", linewidth=1, linestyle="--")
    ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
    ax.set_yticks(ticks := [0, 0.1, 1, 10, 100], [f"{tick:g}" for tick in ticks])
    ax.set_ylim(0, 300)
    ax.set_xticks(range(len(rewards)), rewards)
    ax.set_xlim(-0.5, len(rewards) - 0.5)
    ax.set_xlabel("reward")
    ax.set_ylabel("worth of a sample, in rloo samples")
    ax.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_hybrid(ax: Axes, table: pd.DataFrame, rewards: Sequence[str]) -> Axes:
    """Expected cosine of the blend over that of the better of its parts, with 95 % intervals; cut above twice.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.estimators.study.hybrid_table`.
        rewards: Which, in this order.

    Returns:
        The axes.
    """
    for i, reward in enumerate(rewards):
        rows = table[table.reward == reward]
        x = rows.n * 1.08 ** (i - (len(rewards) - 1) / 2)  # side by side, or intervals hide each other
        line = ax.plot(x, rows.ratio, "o-", linewidth=1, label=reward)[0]
        if rows.low.notna().all():
            ends = [rows.ratio - rows.low.astype(float), rows.high.astype(float) - rows.ratio]
            ax.errorbar(x, rows.ratio, yerr=ends, fmt="none", ecolor=line.get_color(), capsize=3)
    ax.axhline(1, color="#888888", linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_xticks(sorted(table.n.unique()), [str(n) for n in sorted(table.n.unique())])
    ax.minorticks_off()
    ax.set_xlabel("batch (completions)")
    ax.set_ylabel("cosine of the blend / the better part's")
    ax.set_ylim(0, min(2.0, ax.get_ylim()[1]))  # an interval that says nothing would squeeze those that do
    ax.legend(title="reward", loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def plot_spread(ax: Axes, table: pd.DataFrame) -> Axes:
    """The paper's "gradient variance" against the variance relative to the squared gradient, both on log axes.

    One point a reward and estimator; settings of one estimator look alike.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.estimators.study.spread_table`.

    Returns:
        The axes.
    """
    shown = table[np.isfinite(table.relative)]
    markers = dict(zip(shown.reward.unique(), itertools.cycle("osv^DPX<h"), strict=False))
    for row in shown.itertuples():
        ax.plot(row.tensor_spread, row.relative, markers[row.reward], color=estimator_color(row.estimator))
    kinds = dict.fromkeys(name.split("_tau")[0] for name in shown.estimator)
    handles = [Line2D([], [], linestyle="none", marker="o", color=estimator_color(kind), label=kind) for kind in kinds]
    handles += [Line2D([], [], linestyle="none", marker=marker, color="#bbbbbb", label=f"reward {reward}")
                for reward, marker in markers.items()]  # fmt: skip
    ax.legend(handles=handles, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_formatter(NullFormatter())
    ax.set_xlabel('the paper\'s "variance": spread over parameter tensors')
    ax.set_ylabel("variance / |mean gradient|² of a batch")
    return ax
