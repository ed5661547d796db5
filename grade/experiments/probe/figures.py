"""Figures of the entropy probe: what it predicts of a policy, how precisely, and what it costs."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from grade.plotting import SERIES, color

_UP, _DOWN = color("bad"), color("good")  # parts that raise the entropy, and that lower it


def plot_sweep(ax: Axes, table: pd.DataFrame) -> Axes:
    """Predicted and true change of entropy per size of step, against the learning rate.

    Both are divided by the step's multiple of the run's learning rate, so that a linear prediction is a level line, and
    all step sizes share a signed linear axis. Bars: two standard errors.
    """
    steps = table.groupby("step")
    for i, (step, rows) in enumerate(steps):
        shade, shift = SERIES[i % len(SERIES)], _shift(i, len(steps))
        ax.plot(rows.learning_rate, rows.delta_h1_forward / rows.multiple, color=shade, linewidth=1.5,
                label=f"training step {step}: predicted")  # fmt: skip
        ax.errorbar(rows.learning_rate * shift, rows.delta_h / rows.multiple,
                    yerr=2 * rows.delta_h_stderr / rows.multiple, fmt="o", color=shade, markersize=6, capsize=3,
                    linewidth=1, label=f"training step {step}: true, ± 2 SE")  # fmt: skip
    ax.axhline(0, color=color("line"), linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_title("The true change agrees with the prediction")
    ax.set_xlabel("learning rate of the step")
    ax.set_ylabel("change / step size, nats a completion")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return ax


def plot_linearity(ax: Axes, table: pd.DataFrame) -> Axes:
    """Linear over true change on the same samples, minus one, against learning rate. Bars: two standard errors."""
    steps = table.groupby("step")
    for i, (step, rows) in enumerate(steps):
        ax.errorbar(rows.learning_rate * _shift(i, len(steps)), rows.linearity_error,
                    yerr=2 * rows.linearity_error_stderr, fmt="o-", color=SERIES[i % len(SERIES)], capsize=3,
                    linewidth=1, label=f"training step {step}, ± 2 SE")  # fmt: skip
    ax.axhline(0, color=color("line"), linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_title("The error vanishes with the step")
    ax.set_xlabel("learning rate of the step")
    ax.set_ylabel("predicted / true change - 1, same samples")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return ax


def _shift(i: int, n: int) -> float:
    """Factor that lets the bars of n training steps stand side by side on a log axis."""
    return 1.08 ** (i - (n - 1) / 2)


def plot_layers(ax: Axes, layers: pd.DataFrame) -> Axes:
    """Each layer's part of the predicted change."""
    names = ["rest" if layer < 0 else str(layer) for layer in layers.layer]
    ax.bar(names, layers.part, color=[_UP if part > 0 else _DOWN for part in layers.part])
    ax.axhline(0, color=color("text"), linewidth=0.8)
    ax.set_title("Layers pull the entropy both ways")
    ax.set_xlabel("layer")
    ax.set_ylabel("part of the predicted change, nats")
    if len(layers) > 12:
        ax.set_xticks(range(0, len(layers), 5))
    ax.legend(handles=[Patch(color=_UP, label="raises entropy"), Patch(color=_DOWN, label="lowers entropy")])
    return ax


def plot_sequences(ax: Axes, parts: pd.Series) -> Axes:
    """Each completion's part of the predicted change, in order, with their mean."""
    values = sorted(parts)
    ax.bar(range(len(values)), values, width=1, color=[_UP if value > 0 else _DOWN for value in values])
    ax.axhline(parts.mean(), color=color("text"), linewidth=1, linestyle="--", label="mean: the prediction")
    ax.set_title("The mean is small beside its parts")
    ax.set_xlabel("completions, in order of their parts")
    ax.set_ylabel("part of the predicted change, nats")
    ax.legend()
    return ax


def plot_precision(ax: Axes, table: pd.DataFrame) -> Axes:
    """Change of entropy against step size, the forward passes in each type."""
    first = table[table.dtype == table.dtype.iloc[0]]
    ax.plot(first.multiple, first.predicted, color=color("line"), linestyle="--", linewidth=1.5, label="predicted")
    for shade, mark, (name, rows) in zip(SERIES, "osv", table.groupby("dtype", sort=False), strict=False):
        ax.plot(rows.multiple, rows.delta_h, f"{mark}-", color=shade, linewidth=1, label=f"measured in {name}")
    ax.axhline(0, color=color("text"), linewidth=0.8)
    ax.set_xscale("log")
    ax.set_title("bfloat16 is too coarse for small steps")
    ax.set_xlabel("step size, times the learning rate")
    ax.set_ylabel("change of entropy, nats a completion")
    ax.legend()
    return ax


def plot_phases(ax: Axes, table: pd.DataFrame) -> Axes:
    """Peak of live bytes in each phase of a probe, in decimal MB above those that were there before it."""
    ax.barh(table.phase, table.peak_bytes / 1e6, color=SERIES[0])
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.set_title("Gradients need the most memory")
    ax.set_xlabel("peak of live bytes, MB")
    return ax
