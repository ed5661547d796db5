"""Figures of the quality of gradients, from the experiment's tables."""

import re
from collections.abc import Sequence

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS
from grade.experiments.plotting import INTERVAL, panels, shades, with_ends

_WORDS = {
    r"m1": ", 1 draw", r"m(\d+)": r", \1 draws", r"tau([\d.]+)": r", tau \1", r"k(\d+)": r", K \1",
    r"hops0": "", r"hops1": ", 1 hop", r"hops(\d+)": r", \1 hops",
}  # fmt: skip
"""What a setting in an estimator's id is in words."""


def label(name: str) -> str:
    """An estimator for people: what its short id in the tables says, in words.

    K is the size of the perturbed support; hops are feedback hops, of which there are none if none are mentioned.

    >>> label("gumbel_rao_m8_tau1_hops0"), label("ste_tau0.5_k64_hops1"), label("rloo")
    ('gumbel_rao, 8 draws, tau 1', 'ste, tau 0.5, K 64, 1 hop', 'rloo')
    """
    for setting, words in _WORDS.items():
        name = re.sub(f"_{setting}(?=_|$)", words, name)
    return name


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


def _labelled(table: pd.DataFrame) -> pd.DataFrame:
    """The table with estimators' labels, and the estimator without its settings."""
    labels = table.estimator.map(label)
    return table.assign(label=labels, family=labels.str.split(",").str[0])


def _palette(table: pd.DataFrame) -> dict[str, str]:
    return shades(dict(zip(table.label, table.family, strict=True)))


def _points(many: int) -> dict:
    """Points with bars, side by side."""
    return dict(kind="point", dodge=0.6 if many > 1 else False, markers=list("osv^DPX<h"[:many]), capsize=0.04,
                err_kws=dict(linewidth=1), **INTERVAL)  # fmt: skip
