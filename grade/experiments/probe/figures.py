"""Figures of the entropy probe: what it predicts of a policy, how precisely, and what it costs."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.plotting import INTERVAL, SERIES, color, panels, with_ends

_SIGNS = {"raises entropy": color("bad"), "lowers entropy": color("good")}


def sweep_figure(table: pd.DataFrame) -> Figure:
    """Predicted and true change over the step's multiple of the run's learning rate, and predicted over true minus 1.

    Divided so, a linear prediction is a level line, and all step sizes share a signed axis. Bars: ± 2 SE.
    """
    change = dict(quantity="change / step size, nats per completion")
    predicted = table.assign(y=table.delta_h1_forward / table.multiple, error=0.0, what="predicted", **change)
    true = table.assign(y=table.delta_h / table.multiple, error=table.delta_h_stderr / table.multiple, what="true",
                        **change)  # fmt: skip
    ratio = table.assign(y=table.linearity_error, error=table.linearity_error_stderr, what="true",
                         quantity="predicted / true change - 1, same samples")  # fmt: skip
    shown = pd.concat([predicted, true, ratio], ignore_index=True)
    shown = shown.assign(low=shown.y - 2 * shown.error, high=shown.y + 2 * shown.error)
    shown["learning_rate"] *= 1.08 ** shown.step.rank(method="dense")  # the bars of training steps stand side by side
    shown["step"] = "training step " + shown.step.astype(str)
    grid = panels(
        sns.relplot, with_ends(shown, "y"), "The true change agrees with the prediction, whose error vanishes with the "
        "step", kind="line", x="learning_rate", y="y", hue="step", palette=SERIES[: table.step.nunique()],
        style="what", markers=True, err_style="bars", err_kws=dict(capsize=3), col="quantity", linewidth=1.3,
        height=4, facet_kws=dict(sharey=False), **INTERVAL,
    )  # fmt: skip
    for ax in grid.axes.flat:
        ax.axhline(0, color=color("line"), linewidth=1, linestyle="--")
    for quantity, ax in grid.axes_dict.items():
        ax.set(xscale="log", xlabel="learning rate of the step", ylabel=quantity, title="")
    return grid.figure


def parts_figure(layers: pd.DataFrame, sequences: pd.Series) -> Figure:
    """Each layer's and each completion's part of one prediction: layers sum to it, completions average to it."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    names = layers.layer.astype(str).where(layers.layer >= 0, "rest")
    parts = layers.part, sequences.sort_values()
    for ax, x, y in zip(axes, (names, np.arange(len(sequences))), parts, strict=True):
        sns.barplot(x=x.to_numpy() if x is names else x, y=y.to_numpy(), hue=np.where(y > 0, *_SIGNS), palette=_SIGNS,
                    dodge=False, width=0.9, saturation=1, ax=ax)  # fmt: skip
        ax.axhline(0, color=color("text"), linewidth=0.8)
        ax.xaxis.set_major_locator(plt.MaxNLocator(7, integer=True))
        ax.set_ylabel("part of the predicted change, nats")
    axes[0].set(title="Layers pull the entropy both ways", xlabel="layer")
    axes[1].axhline(sequences.mean(), color=color("text"), linewidth=1, linestyle="--", label="mean: the prediction")
    axes[1].set(title="The mean is small beside its parts", xlabel="completions, in order of their parts")
    axes[1].legend()
    return fig


def precision_figure(table: pd.DataFrame) -> Figure:
    """Change of entropy against step size, the forward passes in each type."""
    first = table[table.dtype == table.dtype.iloc[0]]
    lines = [first.assign(delta_h=first.predicted, line="predicted"), table.assign(line="measured in " + table.dtype)]
    grid = panels(
        sns.relplot, pd.concat(lines, ignore_index=True), "bfloat16 is too coarse for small steps", kind="line",
        x="multiple", y="delta_h", hue="line", palette=[color("line"), *SERIES[: table.dtype.nunique()]], style="line",
        markers=True, height=3.8, aspect=1.6,
    )  # fmt: skip
    for ax in grid.axes.flat:
        ax.axhline(0, color=color("text"), linewidth=1, linestyle="--")
    grid.set(xscale="log", xlabel="step size, times the learning rate",
             ylabel="change of entropy, nats per completion")  # fmt: skip
    return grid.figure


def phases_figure(table: pd.DataFrame) -> Figure:
    """Peak of live bytes in each phase of a probe, in decimal MB above those that were there before it."""
    fig, ax = plt.subplots(figsize=(6.4, 2.8))
    sns.barplot(x=table.peak_bytes / 1e6, y=table.phase, color=SERIES[0], saturation=1, ax=ax)
    ax.set(title="Gradients need the most memory", xlabel="peak of live bytes, MB", ylabel="")
    return fig
