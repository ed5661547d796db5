"""Figures of Experiment 6, from its tables."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from grade.experiments.exp6.metrics import fitted_exponent
from grade.experiments.plotting import INTERVAL, SERIES, color, palette, panels, plain_log_ticks, with_errors

_SMALLEST_MASS = 1e-6  # rounding in float32
_AXES = {"samples": "training samples (completions)", "seconds": "training time (seconds, evaluations not counted)"}
_CURVES = {"train/reward": "reward, P(positive)", "train/kl": "KL, nats per token", "train/grad_norm": "gradient norm"}


def reward_figure(curves: pd.DataFrame, title: str, against: str = "samples") -> Figure:
    """Held-out reward and the gold judge's, against training samples or seconds, averaged over a method's runs.

    The band is ±1 standard error: over prompts of one run, over runs where a method has several.
    """
    kinds = {"reward": "held-out reward", "gold": "gold judge"}
    parts = []
    for kind, label in kinds.items():
        names = {f"val/{kind}_{name}": name for name in ("mean", "stderr", "n")}
        if set(names) <= set(curves):
            rows = curves[["run", "step", against, *names]].rename(columns=names).dropna(subset="mean")
            parts.append(rows.assign(judge=label, method=rows.run.str.replace(r"-\d+$", "", regex=True)))
    by_step = pd.concat(parts).groupby(["judge", "method", "step"], sort=False)
    shown = by_step.agg(x=(against, "mean"), mean=("mean", "mean"), stderr=("stderr", "first"), sem=("mean", "sem"),
                        n=("n", "min")).reset_index()  # fmt: skip
    grid = panels(
        sns.relplot, with_errors(shown, "mean", shown["sem"].fillna(shown.stderr)), title, kind="line", x="x", y="mean",
        hue="method", palette=palette(shown.method), style="judge", markers=True, height=4.2, aspect=1.7, **INTERVAL,
    )  # fmt: skip
    grid.set(xlabel=_AXES[against], ylabel=f"P(positive) of {shown.n.min():.0f} completions ± SE", xlim=(0, None))
    return grid.figure


def training_figure(curves: pd.DataFrame, title: str) -> Figure:
    """Reward, KL and gradient norm of the training batches, step by step, with the standard error over runs."""
    curves = curves.assign(method=curves.run.str.replace(r"-\d+$", "", regex=True))
    table = curves.melt(["method", "step"], list(_CURVES), "quantity")
    runs = curves.groupby("method").run.nunique()
    title += " (n runs: " + ", ".join(f"{method} {n}" for method, n in runs.items()) + ")"
    grid = panels(
        sns.relplot, table.dropna(), title, kind="line", x="step", y="value", hue="method",
        palette=palette(table.method), errorbar=("se", 1), col="quantity", facet_kws=dict(sharey=False), height=3,
        linewidth=1.6,
    )  # fmt: skip
    for quantity, ax in grid.axes_dict.items():
        ax.set(xlabel="optimizer step", ylabel=_CURVES[quantity], title="")
    ax.set_yscale("log")
    plain_log_ticks(ax)
    return grid.figure


def time_figure(table: pd.DataFrame) -> Figure:
    """Seconds of one gradient against completion length, log-log, with the exponent of three or more lengths."""
    labels = {}
    for engine, rows in table.groupby("engine", sort=False):
        several = rows["T"].nunique() > 2
        labels[engine] = f"{engine}: $T^{{{fitted_exponent(rows['T'], rows.seconds):.2f}}}$" if several else engine
    colors = {label: color(engine.partition(",")[0]) for engine, label in labels.items()}
    grid = panels(
        sns.relplot, table.assign(label=table.engine.map(labels)), "At equal length, replay is the fastest engine",
        kind="line", x="T", y="seconds", hue="label", palette=colors, style="label", markers=True, dashes=False,
        height=4.2, aspect=1.5, markersize=7,
    )  # fmt: skip
    lengths = sorted(table["T"].unique())
    grid.set(xscale="log", yscale="log", xlabel="completion length T (tokens)",
             ylabel="one gradient with its rollout (seconds)")  # fmt: skip
    grid.ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
    grid.ax.xaxis.set_minor_formatter(NullFormatter())
    plain_log_ticks(grid.ax)
    return grid.figure


def mass_figure(table: pd.DataFrame) -> Figure:
    """Probability outside the K likeliest tokens against K, a line for each tau, log-log.

    What is missing is drawn rather than what is held: 0.999 and 0.96 look alike, 0.001 and 0.04 do not.
    """
    shown = table.assign(outside=1 - table.mass, tau="tau = " + table.tau.map("{:g}".format))
    shown = shown[shown.outside > _SMALLEST_MASS]
    grid = panels(
        sns.relplot, shown, "At tau 1 the top 256 tokens leave out far over 0.1 %", kind="line", x="K", y="outside",
        hue="tau", palette=SERIES[: shown.tau.nunique()], style="tau", markers=True, dashes=False, height=4, aspect=1.6,
    )  # fmt: skip
    grid.ax.axhline(1e-3, color=color("text"), linewidth=1, linestyle=":")
    grid.ax.annotate("claimed: less than 0.1 % outside", (0.01, 1e-3), xycoords=("axes fraction", "data"), va="top",
                     fontsize=9, textcoords="offset points", xytext=(0, -5))  # fmt: skip
    grid.set(xscale="log", yscale="log", xlabel="support size K (tokens)", ylabel="probability outside the top K")
    sizes = sorted(table.K.unique())
    grid.ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    grid.ax.xaxis.set_minor_formatter(NullFormatter())
    grid.ax.yaxis.set_major_formatter(_PERCENT)
    return grid.figure


def hops_figure(table: pd.DataFrame) -> Figure:
    """Relative error of the replayed gradient against the number of feedback hops, log scale, a panel per policy."""
    error = table[(table.estimator == "ste") & (table.hops == 2)].error.max()
    grid = panels(
        sns.relplot, table, f"Straight-through: with two hops the error is at most {100 * error:.2g} %", kind="line",
        x="hops", y="error", hue="estimator", palette=palette(table.estimator), style="estimator",
        markers=True, dashes=False, col="policy",
        height=3.4, aspect=1.2,
    )  # fmt: skip
    grid.set(yscale="log", xlabel="feedback hops", ylabel="relative error of the gradient",
             xticks=sorted(table.hops.unique()))  # fmt: skip
    grid.set_titles("{col_name} policy")
    for ax in grid.axes.flat:
        ax.yaxis.set_major_formatter(_PERCENT)
    return grid.figure


_PERCENT = FuncFormatter(lambda y, _: f"{100 * y:g} %")
