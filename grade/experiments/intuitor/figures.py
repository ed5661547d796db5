"""Figures of document 004."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from grade.plotting import SERIES, color, plain_log_ticks

_COLORS = {"PPO": color("ppo"), "Intuitor": SERIES[0]}
_PUBLISHED, _DOCUMENT = SERIES[0], SERIES[1]  # self-certainty and the document's formula


def plot_peaks_by_length(ax: Axes, table: pd.DataFrame, stated: Mapping[int, tuple[float, float]]) -> Axes:
    """Traced peaks of PPO and Intuitor against length, beside the document's, in decimal GB on a log axis."""
    lengths = sorted(table.tokens.unique())
    known = [n for n in lengths if n in stated]
    for i, method in enumerate(("PPO", "Intuitor")):
        if known:
            ax.plot(known, [stated[n][i] for n in known], ":", color=_COLORS[method], label=f"{method}, as stated")
        for kind, line, mark in (("dense logits", "--", "s"), ("logits in chunks", "-", "o")):
            rows = table[table.step == f"{method}, {kind}"]
            # Both methods have the same peak: PPO's marks are filled and larger, Intuitor's open, so that both show.
            face, size, layer = (_COLORS[method], 6, 3) if method == "PPO" else ("none", 11, 2)
            ax.plot(rows.tokens, rows.peak_gb, line, marker=mark, markersize=size, markerfacecolor=face, zorder=layer,
                    markeredgewidth=1.5, color=_COLORS[method], linewidth=1.5, label=f"{method}, {kind}")  # fmt: skip
    ax.set_yscale("log")
    plain_log_ticks(ax)
    ax.set_xticks(lengths, [f"{n / 1024:g}K" if n >= 1024 else str(n) for n in lengths])
    ax.set_title("Traced, Intuitor needs no more memory than PPO")
    ax.set_xlabel("tokens of a sequence")
    ax.set_ylabel("peak of one GPU, GB")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def plot_peak_sweep(ax: Axes, sweep: pd.DataFrame) -> Axes:
    """Self-certainty and the document's formula against the height of one logit."""
    ax.plot(sweep.peak, sweep.published, marker="o", color=_PUBLISHED, label="self-certainty + log V")
    ax.plot(sweep.peak, sweep.document, marker="s", color=_DOCUMENT, label="document's formula")
    ax.set_ylim(0, 1.08 * max(sweep.published.max(), sweep.document.max()))
    ax.set_title("One confident token hardly moves the formula")
    ax.set_xlabel("one logit, raised to")
    ax.set_ylabel("score of the row, nats")
    ax.legend()
    return ax


def plot_scores(ax: Axes, scores: pd.DataFrame) -> Axes:
    """The document's score against self-certainty, one point per completion, each less its prompt's mean."""
    centred = scores - scores.groupby("group").transform("mean").reindex(columns=scores.columns, fill_value=0)
    ax.scatter(centred.self_certainty, centred.document, s=14, alpha=0.6, color=_DOCUMENT, linewidths=0,
               label="one completion")  # fmt: skip
    ends = [centred.self_certainty.min(), centred.self_certainty.max()]
    ax.plot(ends, ends, color=color("line"), linewidth=1, linestyle="--", label="equal scores")
    ax.set_title("On real text it scores on another scale")
    ax.set_xlabel("self-certainty less the prompt's mean, nats")
    ax.set_ylabel("formula less the prompt's mean, nats")
    ax.legend()
    return ax
