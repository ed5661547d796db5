"""Figures: one style, one colour for each method and engine, functions that draw on Axes and return them.

Colours are told apart under the common colour-vision deficiencies (Okabe and Ito 2008, with two of Paul Tol's), and
marks and line styles repeat what colour says. Every function takes tidy frames and computes no more than a mean, a
standard error or a fitted exponent. Saving is left to the caller.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

_COLORS = {
    # relaxed methods and estimators
    "ste": "#D55E00", "gumbel": "#0072B2", "gumbel_rao": "#009E73", "reinmax": "#CC79A7",
    "st": "#661100",
    "ste_legacy": "#E69F00", "gumbel_legacy": "#56B4E9", "ste_trunk": "#AA4499", "gumbel_trunk": "#117733",
    "auto": "#999933", "tilt": "#44AA99",
    # policy gradients
    "rloo": "#222222", "grpo": "#6A3D9A", "ppo": "#8C510A", "reinforce": "#7F7F7F", "remax": "#B8860B",
    # engines
    "replay": "#332288", "unrolled": "#666666", "checkpointed": "#882255",
    # what is no method: a reference line, what is left over, text on a figure
    "neutral": "#9AA5B1", "line": "#888888", "text": "#444444", "good": "#0072B2", "bad": "#D55E00",
}  # fmt: skip
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
"""Colours in order, for series that have no name of their own."""
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


def color(name: str) -> str:
    """The one colour of a method, engine or role.

    A setting of a method has the method's: ``gumbel_rao_m8_tau1`` is ``gumbel_rao``. Grey for a name of the user's own.

    >>> color("ste"), color("gumbel_rao_m8_tau1") == color("gumbel_rao"), color("mine") == color("neutral")
    ('#D55E00', True, True)
    """
    keys = [key for key in _COLORS if f"{name}_".startswith(f"{key}_")]
    return _COLORS[max(keys, key=len, default="neutral")]


def palette(names: Iterable[str]) -> dict[str, str]:
    """The colour of each name as seaborn takes them."""
    return {name: color(name) for name in names}


def shades(methods: Mapping[str, str]) -> dict[str, Any]:
    """A colour for each name, from its method: the method's own for the first setting of one, lighter for the next."""
    names = pd.Series(methods)
    return {name: sns.light_palette(color(method), len(rows) + 2)[-1 - place] for method, rows in names.groupby(names)
            for place, name in enumerate(rows.index)}  # fmt: skip


def use_style() -> None:
    """Make this project's style matplotlib's default. Call once, before the first figure."""
    mpl.rcParams.update(_STYLE)


def plain_log_ticks(ax: Axes) -> None:
    """0.5, 1, 2, 5 instead of powers of ten: these axes often span one decade."""
    ax.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())


INTERVAL = dict(estimator="median", errorbar=("pi", 100))
"""How seaborn draws the rows of `with_ends`: the value, and an interval that is known already."""


def with_ends(table: pd.DataFrame, value: str, low: str = "low", high: str = "high") -> pd.DataFrame:
    """Rows of the value and of both ends of its interval in one column, for `INTERVAL`; without what is not finite."""
    columns = [table[name].astype(float).replace([np.inf, -np.inf], np.nan) for name in (value, low, high)]
    return pd.concat([table.assign(**{value: column}) for column in columns], ignore_index=True).dropna(subset=value)


def with_errors(table: pd.DataFrame, value: str, error: Any) -> pd.DataFrame:
    """`with_ends` where the interval is the value plus and minus an error."""
    return with_ends(table.assign(low=table[value] - error, high=table[value] + error), value)


def panels(
    draw: Callable[..., Any], table: pd.DataFrame, title: str, level: float | None = None, **options: Any
) -> Any:  # fmt: skip
    """One of seaborn's grids (`relplot`, `catplot`) in this layout: title above, legend below, dashes at a level."""
    with mpl.rc_context({"figure.constrained_layout.use": False}):  # seaborn's own layout would warn of it
        grid = draw(table, **options)
        if level is not None:
            grid.refline(y=level, color=color("line"), linewidth=1)
    grid.figure.set_layout_engine("constrained")
    grid.figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure, lines = grid.figure, 1.0  # of text besides the panels
    if grid.legend is not None:
        texts = [text.get_text() for text in grid.legend.get_texts()]
        series = [i for i, text in enumerate(texts) if text not in options.values()]  # not the names of columns
        handles, texts = [grid.legend.legend_handles[i] for i in series], [texts[i] for i in series]
        grid.legend.remove()
        columns = max(1, int(12 * figure.get_figwidth()) // (max(map(len, texts)) + 6))
        figure.legend(handles, texts, loc="outside lower center", ncols=columns)
        lines += -(-len(texts) // columns)
    figure.set_figheight(figure.get_figheight() + 0.25 * lines)
    return grid
