"""Figures of traces: stacked bytes by category, and live bytes over a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from grade.memory.live import CATEGORIES
from grade.memory.trace import Trace

GIB = 2**30
COLORS = {
    "weights": "#BBBBBB", "adapter": "#88CCEE", "gradients": "#44AA99", "optimizer": "#117733",
    "activations": "#D55E00", "logits": "#CC79A7", "kv cache": "#332288", "rollout": "#0072B2", "temporary": "#DDCC77",
}  # fmt: skip
"""Okabe and Ito's and Paul Tol's colours; what a step adds is warm or dark, what is always there is grey or green."""


def plot_categories(ax: Axes, traces: Mapping[str, Trace], budget: int | None = None) -> Axes:
    """One stacked bar a configuration: bytes at the peak by category, in GiB.

    Args:
        ax: Where to draw.
        traces: Traces by name, from top to bottom.
        budget: Draw a line at this many bytes.

    Returns:
        The axes.
    """
    names = list(traces)
    left = np.zeros(len(names))
    for category in CATEGORIES:
        sizes = np.array([traces[name].categories[category] for name in names]) / GIB
        if sizes.max() > 0.005 * max(t.peak for t in traces.values()) / GIB:
            ax.barh(names, sizes, left=left, color=COLORS[category], label=category, height=0.7)
        left += sizes
    for y, total in enumerate(left):
        ax.annotate(f"{total:.1f}" if total >= 10 else f"{total:.2f}", (total, y), xytext=(4, 0),
                    textcoords="offset points", va="center", fontsize=9)  # fmt: skip
    if budget is not None:
        ax.axvline(budget / GIB, color="black", linestyle="--", linewidth=1)
        where = dict(ha="right", va="bottom", fontsize=9, xytext=(-3, 0), textcoords="offset points")
        ax.annotate(f"{budget / GIB:.0f} GiB", (budget / GIB, -0.55), **where)
    ax.invert_yaxis()
    ax.set_xlabel("bytes at the peak, GiB (traced)")
    ax.set_xlim(0, 1.12 * max(left.max(), (budget or 0) / GIB))
    ax.grid(False, axis="y")
    ax.figure.legend(loc="outside lower center", ncols=6)  # of the figure: the axes may be narrow beside long names
    return ax


def plot_timeline(ax: Axes, trace: Trace) -> Axes:
    """Live bytes over the allocations of one step, each phase in its own colour.

    Args:
        ax: Where to draw.
        trace: A trace of all layers; of an extrapolated one the traced layers are shown.

    Returns:
        The axes.
    """
    colors = {"forward": "#D55E00", "rollout": "#0072B2", "reference": "#888888", "reward": "#CC79A7",
              "scoring": "#CC79A7", "backward": "#332288", "optimizer": "#117733"}  # fmt: skip
    phases = np.array([phase for phase, _ in trace.timeline])
    live = np.array([nbytes for _, nbytes in trace.timeline]) / GIB
    index = np.arange(len(live))
    for phase in dict.fromkeys(phases.tolist()):
        own = np.where(phases == phase, live, np.nan)
        ax.plot(index, own, color=colors.get(phase, "black"), label=phase, linewidth=1.2)
    ax.set_xlabel("allocations of one optimizer step")
    ax.set_ylabel("live bytes, GiB")
    ax.legend()
    return ax
