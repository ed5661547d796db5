"""Figures of the entropy probe: what it predicts of a policy, how precisely, and what it costs."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.plotting import INTERVAL, SERIES, color, panels, with_errors

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
    shown["learning_rate"] *= 1.08 ** shown.step.rank(method="dense")  # the bars of training steps stand side by side
    shown["step"] = "training step " + shown.step.astype(str)
    off = table.linearity_error.abs().groupby(table.multiple).max()
    title = f"The prediction is off by at most {off.iloc[0]:.1%} at {off.index[0]:g} of the run's learning rate, by " \
            f"{off.iloc[-1]:.0%} at {off.index[-1]:g}"  # fmt: skip
    grid = panels(
        sns.relplot, with_errors(shown, "y", 2 * shown.error), title, level=0, kind="line", x="learning_rate", y="y",
        hue="step", palette=SERIES[: table.step.nunique()],
        style="what", markers=True, err_style="bars", err_kws=dict(capsize=3), col="quantity", linewidth=1.3,
        height=4, facet_kws=dict(sharey=False), **INTERVAL,
    )  # fmt: skip
    for quantity, ax in grid.axes_dict.items():
        ax.set(xscale="log", xlabel="learning rate of the step", ylabel=quantity, title="")
    return grid.figure


def parts_figure(layers: pd.DataFrame, sequences: pd.Series, stderr: float) -> Figure:
    """Parts of one prediction: layers' sum to it, completions' average to it, with the mean's standard error."""
    fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
    names = layers.layer.astype(str).where(layers.layer >= 0, "rest").to_numpy()
    parts = (names, layers.part.to_numpy()), (np.arange(len(sequences)), sequences.sort_values().to_numpy())
    for ax, (x, y) in zip(axes, parts, strict=True):
        sns.barplot(x=x, y=y, hue=np.where(y > 0, *_SIGNS), palette=_SIGNS, dodge=False, width=0.9, saturation=1, ax=ax)
        ax.axhline(0, color=color("text"), linewidth=0.8)
        ax.xaxis.set_major_locator(plt.MaxNLocator(7, integer=True))
        ax.set_ylabel("part of the predicted change, nats")
    axes[0].set(title=f"The layers' parts sum to {layers.part.sum():.2f} nats", xlabel="layer")
    mean = sequences.mean()
    axes[1].axhline(mean, color=color("text"), linewidth=1, linestyle="--", label="mean: the prediction")
    axes[1].axhspan(mean - 2 * stderr, mean + 2 * stderr, color=color("text"), alpha=0.2, linewidth=0, label="± 2 SE")
    axes[1].set(title=f"The completions' parts average to {mean:.2f} ± {stderr:.2f}",
                xlabel="completions, in order of their parts")  # fmt: skip
    axes[1].legend()
    return fig


def phases_figure(table: pd.DataFrame) -> Figure:
    """Peak of live bytes in each phase of a probe, in decimal MB above those that were there before it."""
    fig, ax = plt.subplots(figsize=(6.4, 2.8))
    sns.barplot(x=table.peak_bytes / 1e6, y=table.phase, color=SERIES[0], saturation=1, ax=ax)
    most = table.phase[table.peak_bytes >= 0.95 * table.peak_bytes.max()]
    ax.set(title=f"Most memory is needed by: {', '.join(most)}", xlabel="peak of live bytes, MB", ylabel="")
    return fig
