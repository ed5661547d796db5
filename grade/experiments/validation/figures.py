"""Figures of the probe's validation."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.plotting import INTERVAL, SERIES, panels, with_errors


def first_order_figure(table: pd.DataFrame) -> Figure:
    """Predicted over true change of entropy, less 1, in absolute value, against the step size, on log axes."""
    ways = {"forward": "forward mode", "reverse": "reverse mode", "two_batch": "two batches"}
    errors = table.rename(columns=ways)[list(ways.values())].div(table.exact, axis=0).sub(1).abs()
    shown = errors.assign(eta=table.eta).melt("eta", var_name="way", value_name="error")
    title = f"The prediction is off by {errors.iloc[0].max():.1g} of the change at the largest step, by " \
            f"{errors.iloc[-1].max():.1g} at the smallest"  # fmt: skip
    # The three ways nearly coincide: each mark is smaller than the one below it.
    grid = panels(sns.relplot, shown, title, x="eta", y="error", hue="way", palette=SERIES[:3], style="way", size="way",
                  sizes=[240, 110, 30], height=3.6, aspect=1.8)  # fmt: skip
    grid.set(xscale="log", yscale="log", xlabel="step size", ylabel="|predicted / true change - 1|")
    return grid.figure


def importance_figure(table: pd.DataFrame) -> Figure:
    """Mean estimate over true change by importance sampling, ± 2 SE, by step size."""
    ratio, error = table["mean"] / table.exact, 2 * table.bias_stderr / table.exact.abs()
    share = table.ess.map("{:.0%}".format)
    shown = table.assign(
        ratio=ratio, step=table.eta.map("{:g}".format) + "\n" + share,
        weights="weights of " + table.way.map({"whole": "completions", "prefix": "prefixes"}),
    )  # fmt: skip
    grid = panels(
        sns.catplot, with_errors(shown, "ratio", error), "Importance sampling meets the truth within its error",
        level=1, kind="point", x="step", y="ratio", hue="weights", palette=SERIES[:2], dodge=0.3, linestyle="none",
        capsize=0.1, markersize=6, height=3.6, aspect=1.5, err_kws=dict(linewidth=1.5), **INTERVAL,
    )  # fmt: skip
    grid.set(xlabel="step size, and effective share of the samples", ylabel="estimate / true change, ± 2 SE")
    return grid.figure
