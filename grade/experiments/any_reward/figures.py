"""Figures of the experiment on any reward, from its tables."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.frontier import frontier_table
from grade.experiments.learning import main_runs, several_seeds, title
from grade.experiments.plotting import INTERVAL, by_method, color, palette, panels, with_ends

_LINE = dict(color=color("line"), linewidth=1, linestyle="--")


def learning_figure(runs: pd.DataFrame, policy: str, target: float) -> Figure:
    """Held-out reward and KL against samples, a line of panels for each reward, ± one standard error."""
    labels = {"reward": "held-out reward", "kl": "KL, nats"}
    table = main_runs(runs).query("policy == @policy and target_kl == @target").assign(
        subject=lambda rows: rows["subject"].map(title),
    ).melt(["subject", "method", "samples"], list(labels), var_name="what")  # fmt: skip
    grid = panels(sns.relplot, table, "Reward and KL (nats per completion) against samples; dashed: the target",
                  x="samples", y="value", row="subject", col="what", kind="line", errorbar="se", height=1.9, aspect=2.0,
                  facet_kws=dict(sharex="row", sharey=False), **by_method(table))  # fmt: skip
    for (subject, what), ax in grid.axes_dict.items():
        ax.set(title=subject if what == "reward" else "", ylabel=labels[what])
        if what == "kl":
            ax.axhline(target, **_LINE)
    grid.set_xlabels("completions")
    return grid.figure


def frontier_figure(runs: pd.DataFrame, levels: Sequence[float]) -> Figure | None:
    """Highest held-out reward at KL of at most each level, by subject, ± one standard error; None without two seeds."""
    grid = np.linspace(0, max(levels), 41)[1:]
    tables = [frontier_table(rows, grid, "target_kl").assign(subject=title(name))
              for name, rows in several_seeds(main_runs(runs)).groupby("subject", sort=False)]  # fmt: skip
    if not tables:
        return None
    table = pd.concat(tables, ignore_index=True)
    grid = panels(sns.relplot, with_ends(table, "reward"), "The highest reward at KL of at most x (running maximum)",
                  x="kl", y="reward", hue="method", palette=palette(table["method"]), col="subject",
                  col_wrap=min(2, len(tables)),
                  kind="line", height=2.8, aspect=1.3, facet_kws=dict(sharey=False), **INTERVAL)  # fmt: skip
    grid.set_titles("{col_name}").set_axis_labels("KL of at most, nats per completion", "held-out reward")
    return grid.figure
