"""Figures: one style, one colour for each method and engine, functions that draw on Axes and return them.

Colours are told apart under the common colour-vision deficiencies (Okabe and Ito 2008, with two of Paul Tol's), and
marks and line styles repeat what colour says. Every function takes tidy frames and computes no more than a mean, a
standard error or a fitted exponent. Saving is left to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from grade.errors import InputError

METHOD_COLORS = {
    "ste": "#D55E00",
    "gumbel": "#0072B2",
    "ste_legacy": "#E69F00",
    "gumbel_legacy": "#56B4E9",
    "ste_trunk": "#CC79A7",
    "gumbel_trunk": "#009E73",
    "unrolled": "#666666",
    "checkpointed": "#882255",
    "replay": "#332288",
}
METHOD_MARKERS = dict(zip(METHOD_COLORS, "osv^DPX<h", strict=True))
OTHER = "#000000"  # a method that has no colour of its own
NEUTRAL = "#9AA5B1"  # what is no method
_STYLE = {
    "figure.figsize": (6.4, 4.0),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 160,
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 2.0,
    "lines.markersize": 5.0,
}


def use_style() -> None:
    """Make this project's style matplotlib's default. Call once, before the first figure."""
    mpl.rcParams.update(_STYLE)


def plain_log_ticks(ax: Axes) -> None:
    """0.5, 1, 2, 5 instead of powers of ten: these axes often span one decade."""
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def require_columns(frames: Iterable[pd.DataFrame], columns: list[str]) -> None:
    """Raise `InputError` where a frame lacks a column."""
    for frame in frames:
        missing = [column for column in columns if column not in frame]
        if missing:
            raise InputError("columns", list(frame.columns), f"a frame that also has {', '.join(missing)}")
