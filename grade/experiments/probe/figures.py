"""Figures of the entropy probe: its validation, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from torch import Tensor

from grade.entropy.report import ProbeReport

_STEP_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_sweep(ax: Axes, table: pd.DataFrame) -> Axes:
    """True change against learning rate with two standard errors, and the prediction as a line; on log axes.

    Filled marks are increases, open marks decreases of the entropy; a mark of the other fill than its line's is a
    change whose sign was predicted wrongly.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.probe.study.sweep_table`.

    Returns:
        The axes.
    """
    for color, (step, rows) in zip(_STEP_COLORS, table.groupby("step"), strict=False):
        up = rows.delta_h1_forward.iloc[0] > 0
        ax.plot(rows.learning_rate, rows.delta_h1_forward.abs(), color=color, linewidth=1.5,
                label=f"step {step}, {'up' if up else 'down'}")  # fmt: skip
        for grows, fill in ((True, "full"), (False, "none")):
            some = rows[(rows.delta_h > 0) == grows]
            lower = (2 * some.delta_h_stderr).clip(upper=0.95 * some.delta_h.abs())  # log axes have no 0
            ax.errorbar(some.learning_rate, some.delta_h.abs(), yerr=[lower, 2 * some.delta_h_stderr], fmt="o",
                        color=color, fillstyle=fill, markersize=7, capsize=3, linewidth=1)  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("learning rate")
    ax.set_ylabel("change of entropy, nats a completion")
    ax.legend(title="lines: predicted")
    return ax


def plot_linearity(ax: Axes, table: pd.DataFrame) -> Axes:
    """Linear over true change on the same samples, minus one, against learning rate, with two standard errors.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.probe.study.sweep_table`.

    Returns:
        The axes.
    """
    for i, (step, rows) in enumerate(table.groupby("step")):
        ax.errorbar(rows.learning_rate * (1 + 0.06 * i), rows.linearity_error, yerr=2 * rows.linearity_error_stderr,
                    fmt="o-", color=_STEP_COLORS[i % len(_STEP_COLORS)], capsize=3, linewidth=1,
                    label=f"step {step}")  # fmt: skip
    ax.axhline(0, color="#888888", linewidth=1, linestyle="--")
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=0.1)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("linear / true - 1, same samples")
    ax.legend()
    return ax


def plot_layers(ax: Axes, layers: Mapping[int, float]) -> Axes:
    """Each layer's part of the predicted change.

    Args:
        ax: Where to draw.
        layers: From `grade.entropy.report.ProbeReport.layers`.

    Returns:
        The axes.
    """
    colors = ["#D55E00" if value > 0 else "#0072B2" for value in layers.values()]
    ax.bar([str(i) if i >= 0 else "rest" for i in layers], list(layers.values()), color=colors)
    ax.axhline(0, color="#444444", linewidth=0.8)
    ax.set_xlabel("layer")
    ax.set_ylabel("part of the predicted change, nats")
    if len(layers) > 12:
        ax.set_xticks(range(0, len(layers), 5))
    return ax


def plot_sequences(ax: Axes, sequences: Tensor) -> Axes:
    """Each sample's part of the predicted change, in order, with their mean.

    Args:
        ax: Where to draw.
        sequences: From `grade.entropy.report.ProbeReport.sequences` [B, G].

    Returns:
        The axes.
    """
    values = sequences.flatten().sort().values
    ax.bar(range(len(values)), values, width=1, color=["#D55E00" if v > 0 else "#0072B2" for v in values])
    ax.axhline(float(values.mean()), color="#444444", linewidth=1, linestyle="--", label="mean: the prediction")
    ax.set_xlabel("completion, in order of its part")
    ax.set_ylabel("part of the predicted change, nats")
    ax.legend()
    return ax


def plot_precision(ax: Axes, table: pd.DataFrame) -> Axes:
    """Change of entropy against step size, the forward passes in each type.

    Args:
        ax: Where to draw.
        table: From `grade.experiments.probe.study.precision_table`.

    Returns:
        The axes.
    """
    first = table[table.dtype == table.dtype.iloc[0]]
    ax.plot(first.multiple, first.predicted, color="#888888", linestyle="--", linewidth=1.5, label="predicted")
    for color, marker, (name, rows) in zip(_STEP_COLORS, "osv", table.groupby("dtype", sort=False), strict=False):
        ax.plot(rows.multiple, rows.delta_h, f"{marker}-", color=color, linewidth=1, label=name)
    ax.axhline(0, color="#444444", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlabel("step, times the learning rate")
    ax.set_ylabel("change of entropy, nats")
    ax.legend()
    return ax


def plot_phases(ax: Axes, report: ProbeReport) -> Axes:
    """Peak of live bytes in each phase of a probe, in MB above what was there before it.

    Args:
        ax: Where to draw.
        report: Of a probe with ``memory_config.profile_memory``.

    Returns:
        The axes.
    """
    peaks = {k.removeprefix("peak_bytes/"): v / 1e6 for k, v in report.figures.items() if k.startswith("peak_bytes/")}
    ax.barh(list(peaks), list(peaks.values()), color="#332288")
    ax.invert_yaxis()
    ax.set_xlabel("peak, MB")
    return ax
