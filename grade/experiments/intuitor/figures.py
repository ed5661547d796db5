"""Figures of documents 002 and 004."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

_COLORS = {"PPO": "#0072B2", "Intuitor": "#D55E00"}


def plot_peaks_by_length(ax: Axes, table: pd.DataFrame, stated: Mapping[int, tuple[float, float]]) -> Axes:
    """Traced peaks of PPO and Intuitor against length, beside the document's, in GB on a log axis.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.intuitor.study.length_table`.
        stated: Tokens to the document's GB of PPO and Intuitor; lengths that were not traced are left out.

    Returns:
        The axes.
    """
    lengths = sorted(table.tokens.unique())
    known = [n for n in lengths if n in stated]
    for i, method in enumerate(("PPO", "Intuitor")):
        if known:
            ax.plot(known, [stated[n][i] for n in known], ":", color=_COLORS[method], label=f"{method}, as stated")
        for kind, line, marker in (("dense logits", "--", "s"), ("logits in chunks", "-", "o")):
            rows = table[table.step == f"{method}, {kind}"]
            # Both methods have the same peak: filled and larger below, open above, so that both are seen.
            face, size = (_COLORS[method], 9) if method == "PPO" else ("none", 5)
            ax.plot(rows.tokens, rows.peak_gb, line, marker=marker, markersize=size, markerfacecolor=face,
                    color=_COLORS[method], linewidth=1.5, label=f"{method}, {kind}")  # fmt: skip
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{n / 1024:g}K" if n >= 1024 else str(n) for n in lengths])
    ax.set_xlabel("tokens of a sequence")
    ax.set_ylabel("GB on one GPU (traced)")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def plot_peak_sweep(ax: Axes, sweep: pd.DataFrame) -> Axes:
    """Self-certainty and the document's formula against the height of one logit.

    Args:
        ax: Where to draw.
        sweep: From `grade.experiments.intuitor.study.peak_sweep`.

    Returns:
        The axes.
    """
    ax.plot(sweep.peak, sweep.published, marker="o", color="#0072B2", label="self-certainty + log V")
    ax.plot(sweep.peak, sweep.document, marker="s", color="#D55E00", label="document's chunks")
    ax.set_xlabel("one logit raised to")
    ax.set_ylabel("score, nats")
    ax.legend()
    return ax


def plot_scores(ax: Axes, scores: pd.DataFrame) -> Axes:
    """The document's score against self-certainty, one point a completion, each less its prompt's mean.

    Args:
        ax: Where to draw.
        scores: From `grade.experiments.intuitor.study.certainty_figures`.

    Returns:
        The axes.
    """
    centred = scores - scores.groupby("group").transform("mean").reindex(columns=scores.columns, fill_value=0)
    ax.scatter(centred.self_certainty, centred.document, s=14, alpha=0.6, color="#0072B2", linewidths=0)
    low, high = (f(centred.self_certainty.min(), centred.self_certainty.max()) for f in (np.minimum, np.maximum))
    ax.plot([low, high], [low, high], color="#888888", linewidth=1, linestyle="--")
    ax.set_xlabel("self-certainty, less the prompt's mean")
    ax.set_ylabel("document's score, less the mean")
    return ax
