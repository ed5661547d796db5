"""Figures of the experiment on teachers, from its tables."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.plotting import GIB, INTERVAL, SERIES, color, panels, with_errors

NAMES = {
    "rloo": "rloo", "auto": "auto, no hint", "hinted": "hinted", "sibling": "hinted by siblings",
    "nonsense": "hinted, nonsense", "weight_1": "hint, weight 1",
}  # fmt: skip
"""Methods for people, in order; colours follow. The baseline with another seed is no curve of its own."""
_TRAINERS = {"grade": "grade", "trl_distillation": "TRL"}


def learning_figure(runs: pd.DataFrame) -> Figure:
    """Share of right sums on held-out prompts against samples and mean KL, means over seeds with one standard error."""
    groups = runs[runs["method"].isin(NAMES)].groupby(["method", "step"], sort=False)
    table = groups[["samples", "kl", "reward"]].mean().assign(error=groups["reward"].sem()).reset_index()
    table = table.melt(["method", "step", "reward", "error"], ["samples", "kl"], var_name="axis", value_name="x")
    table["axis"] = table["axis"].map({"samples": "completions sampled", "kl": "KL, nats per completion"})
    table["method"] = table["method"].map(NAMES)
    colors = dict(zip(NAMES.values(), SERIES, strict=False))
    order = [name for name in NAMES.values() if name in set(table["method"])]
    grid = panels(sns.relplot, table, "Right sums along training", x="x", y="reward", col="axis", hue="method",
                  hue_order=order, palette=colors, kind="line", sort=False, height=3.6, aspect=1.15,
                  facet_kws=dict(sharex=False))  # fmt: skip
    for name, ax in grid.axes_dict.items():
        for method, rows in table[table["axis"] == name].groupby("method", sort=False):
            ax.errorbar(rows["x"], rows["reward"], rows["error"], fmt="none", ecolor=colors[method], elinewidth=1)
        ax.set(xlabel=name, title="")
    grid.set_ylabels("share of right sums")
    return grid.figure


def distilled_figure(curves: pd.DataFrame) -> Figure:
    """Divergence from the teacher against samples, ours and TRL's; bars: one standard error over held-out prompts."""
    table = curves[curves["trainer"].isin(_TRAINERS)].replace({"trainer": _TRAINERS})
    title = "Divergence from the teacher along training"
    grid = panels(sns.relplot, with_errors(table, "divergence", table["divergence_stderr"]), title, x="samples",
                  y="divergence", hue="trainer", style="trainer", col="teacher", palette=SERIES[:2], kind="line",
                  err_style="bars", height=3.4, aspect=1.3, **INTERVAL)  # fmt: skip
    grid.set_axis_labels("completions sampled", "reverse KL, nats per token").set(ylim=(0, None))
    grid.set_titles("teacher: {col_name}")
    return grid.figure


def traced_figure(traces: pd.DataFrame, trl: pd.DataFrame | None) -> Figure:
    """Traced peaks over those of steps that ran, of steps with a teacher and of TRL's trainers."""
    parts = {"with a teacher": traces.rename(columns={"step": "setting"})}
    if trl is not None:
        parts["TRL's trainers"] = trl
    table = pd.concat({name: part[["setting", "traced", "tracked"]] for name, part in parts.items()}, names=["of"])
    table = table.reset_index().assign(ratio=lambda rows: rows["traced"] / rows["tracked"])
    height = 0.27 * len(table) + 1.4
    grid = panels(sns.catplot, table, "Traced peak over the peak of the step", kind="strip", x="ratio", y="setting",
                  hue="of", palette=SERIES[: len(parts)], size=7, height=height, aspect=8.5 / height)  # fmt: skip
    reach = max(0.02, 1.2 * (table["ratio"] - 1).abs().max())
    grid.set(xlim=(1 - reach, 1 + reach)).set_axis_labels("traced / measured", "")
    grid.ax.axvline(1, color=color("line"), linewidth=1, linestyle="--")
    return grid.figure


def peaks_figure(costs: pd.DataFrame) -> Figure:
    """Peak memory of the processes and seconds per step, of each trainer; a point for each teacher and seed."""
    names = {"trl_distillation": "TRL", "grade": "grade", "grade_adapter": "grade, teacher as adapter"}
    table = costs.assign(trainer=costs["trainer"].map(names), peak=costs["peak_bytes"] / GIB)
    table = table.melt(["trainer", "teacher", "seed"], ["seconds_per_step", "peak"], var_name="what")
    table["what"] = table["what"].map({"seconds_per_step": "seconds per step", "peak": "peak of the process, GiB"})
    grid = panels(sns.catplot, table, "What a step costs", kind="strip", x="value", y="trainer", col="what",
                  order=names.values(), hue="trainer", hue_order=names.values(), palette=SERIES[:3], size=7,
                  sharex=False, legend=False, height=2.2, aspect=1.8)  # fmt: skip
    for ax in grid.axes.flat:
        ax.set_xlim(0, 1.05 * ax.get_xlim()[1])
    grid.set_titles("{col_name}").set_axis_labels("", "")
    return grid.figure
