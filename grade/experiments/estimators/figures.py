"""Figures of the quality of gradients, from the experiment's tables."""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS
from grade.experiments.plotting import INTERVAL, color, panels, shades, with_ends, with_errors

_WORDS = {
    r"m1": ", 1 draw", r"m(\d+)": r", \1 draws", r"tau([\d.]+)": r", tau \1", r"k(\d+)": r", K \1",
    r"hops0": "", r"hops1": ", 1 hop", r"hops(\d+)": r", \1 hops",
}  # fmt: skip
"""What a setting in an estimator's id is in words."""
_DASHES = ("", (4, 1.5), (1, 1), (3, 1, 1, 1), (7, 3), (3, 1, 1, 1, 1, 1))


def label(name: str) -> str:
    """An estimator for people: what its short id in the tables says, in words.

    K is the size of the perturbed support; hops are feedback hops, of which there are none if none are mentioned.

    >>> label("gumbel_rao_m8_tau1_hops0"), label("ste_tau0.5_k64_hops1"), label("rloo")
    ('gumbel_rao, 8 draws, tau 1', 'ste, tau 0.5, K 64, 1 hop', 'rloo')
    """
    for setting, words in _WORDS.items():
        name = re.sub(f"_{setting}(?=_|$)", words, name)
    return name


def bias_variance_figure(table: pd.DataFrame, rewards: Sequence[str], batch: int) -> Figure:
    """Squared bias and variance of a batch over the squared gradient, by reward; without `reinforce`'s long bar."""
    shown = _labelled(table[(table.estimator != "reinforce") & table.reward.isin(rewards)])
    shown["mse"] = shown.bias2.clip(lower=0) + shown.variance / batch
    height = 1.7 + 0.24 * shown.label.nunique()
    grid = panels(sns.catplot, shown, "Relaxed gradients are biased, policy gradients only noisy", kind="bar", x="mse",
                  alpha=0.4, height=height, aspect=3.5 / height, col="reward", col_order=rewards,
                  **_bars(shown))  # fmt: skip
    for reward, ax in grid.axes_dict.items():
        rows = shown[shown.reward == reward]
        rows = with_errors(rows, "bias2", 2 * rows.bias2_stderr)
        sns.barplot(rows, x="bias2", ax=ax, capsize=0.3, err_kws=dict(linewidth=1), **_bars(shown), **INTERVAL)
        ax.axvline(1, color=color("line"), linewidth=1, linestyle="--")
    grid.set(xlim=(0, None), ylabel="", xlabel="")
    grid.set_titles("reward {col_name}")
    grid.figure.supxlabel(f"squared bias (dark, ± 2 SE) and variance of {batch} samples (light) over |gradient|²; "
                          "dashed: a gradient of 0", fontsize=9)  # fmt: skip
    return grid.figure


def cosine_figure(curves: pd.DataFrame, rewards: Sequence[str], crossovers: Mapping[tuple[str, str], float]) -> Figure:
    """Expected cosine with the true gradient against the number of samples, by policy and reward.

    Bands are 95 %, where the table has intervals; a dotted line stands where `rloo` overtakes the chosen estimator.
    """
    shown = _labelled(curves)
    shown[["low", "high"]] = shown[["low", "high"]].astype(float).clip(-1, 1)
    names = {f"{reward}, {policy} training": (policy, reward) for policy in curves.policy.unique()
             for reward in rewards}  # fmt: skip
    shown["panel"] = shown.reward + ", " + shown.policy + " training"
    grid = panels(
        sns.relplot, with_ends(shown, "cosine"),
        "Cosine with the true gradient (dotted: rloo overtakes the chosen ste)", kind="line",
        x="n", y="cosine", hue="label", style="label", palette=_palette(shown), dashes=_dashes(shown), col="panel",
        col_order=list(names), col_wrap=min(3, len(names)), height=2.5, aspect=0.95, **INTERVAL,
    )  # fmt: skip
    grid.set(xscale="log", xlabel="samples (completions)", ylabel="cosine with the truth")
    grid.set(ylim=(min(0, shown.cosine.replace(-np.inf, np.nan).min()), 1))
    grid.set_titles("{col_name}")
    for panel, ax in grid.axes_dict.items():
        batch = crossovers.get(names[panel], 0.0)
        if np.isfinite(batch) and 1 < batch < curves.n.max():
            ax.axvline(batch, color=color("line"), linewidth=1, linestyle=":")
            ax.annotate(f"{batch:,.0f} ", (batch, 0.03), xycoords=("data", "axes fraction"), ha="right", fontsize=9)
    return grid.figure


def worth_figure(table: pd.DataFrame, rewards: Sequence[str]) -> Figure:
    """Policy-gradient samples that one sample of each relaxed estimator is worth, with 95 % intervals, by policy.

    The axis is logarithmic down to 0.1 and linear to 0 below, since a gradient may be worth nothing; it ends at 300.
    """
    shown = _labelled(table[~table.estimator.isin(POLICY_GRADIENTS)]).sort_values("label", kind="stable")
    grid = panels(
        sns.catplot, with_ends(shown, "worth", "worth_low", "worth_high"),
        "Samples of rloo that one relaxed sample is worth (above the line: better than rloo; bars: 95 %)", level=1,
        x="reward", order=rewards, y="worth", hue="label", palette=_palette(shown), linestyle="none", markersize=6,
        row="policy", height=3.2, aspect=2.2,
        **_points(shown.label.nunique()),
    )  # fmt: skip
    grid.set(ylabel="worth, in rloo samples", xlabel="reward (trunk<n>: n layers)")
    grid.set_titles("{row_name} training")
    for ax in grid.axes.flat:
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ax.set_yticks(ticks := [0, 0.1, 1, 10, 100], [f"{tick:g}" for tick in ticks])
        ax.set_ylim(0, 300)
    return grid.figure


def hybrid_figure(table: pd.DataFrame, rewards: Sequence[str]) -> Figure:
    """Expected cosine of the blend over that of the better of its parts, with 95 % intervals; cut above twice."""
    grid = panels(
        sns.catplot, with_ends(table, "ratio"), "The blend over its better part (95 %, cut at 2)", level=1, x="n",
        y="ratio", hue="reward", hue_order=rewards, palette="crest", linewidth=1, col="policy",
        height=3.6, aspect=1.1, **_points(len(rewards)),
    )  # fmt: skip
    grid.set(ylim=(0, 2), xlabel="batch (completions)", ylabel="cosine over the better part's")
    grid.set_titles("{col_name} training")
    return grid.figure


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    """The table with estimators' labels, and the estimator without its settings."""
    labels = table.estimator.map(label)
    return table.assign(label=labels, family=labels.str.split(",").str[0])


def _palette(table: pd.DataFrame) -> dict[str, str]:
    return shades(dict(zip(table.label, table.family, strict=True)))


def _bars(table: pd.DataFrame) -> dict:
    order = table.sort_values("family", key=lambda kinds: kinds.map(list(kinds.unique()).index), kind="stable").label
    return dict(y="label", order=list(order.unique()), hue="label", palette=_palette(table), legend=False, saturation=1)


def _points(many: int) -> dict:
    """Points with bars, side by side."""
    return dict(kind="point", dodge=0.6 if many > 1 else False, markers=list("osv^DPX<h"[:many]), capsize=0.04,
                err_kws=dict(linewidth=1), **INTERVAL)  # fmt: skip


def _dashes(table: pd.DataFrame) -> dict[str, tuple | str]:
    """Dashes tell the settings of an estimator apart."""
    pairs = table[["family", "label"]].drop_duplicates()
    numbers = pairs.groupby("family").cumcount() % len(_DASHES)
    return {name: _DASHES[number] for name, number in zip(pairs.label, numbers, strict=True)}
