"""Figures of the experiment on any reward, from its tables."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.any_reward.metrics import best_worths
from grade.experiments.frontier import frontier_table
from grade.experiments.learning import main_runs, several_seeds, subject_names, title
from grade.experiments.plotting import INTERVAL, SERIES, by_method, color, palette, panels, shades, with_ends

_LINE = dict(color=color("line"), linewidth=1, linestyle="--")


def law_figure(table: pd.DataFrame) -> Figure:
    """The gain in variance of the corrected form against the law ``1 / (1 - R2)``, which is the dashed line."""
    fig, ax = plt.subplots(figsize=(5.6, 4.2))
    shown = table[np.isfinite(table["law"]) & (table["law"] > 0)]
    families, ratio = shown["family"].nunique(), shown["gain"] / shown["law"]
    # Families may coincide: each one's marks are smaller than those below them.
    sns.scatterplot(shown, x="law", y="gain", hue="family", style="family", size="family", alpha=0.8, ax=ax,
                    sizes=list(np.linspace(120, 25, families)), palette=SERIES[:families])  # fmt: skip
    ax.axline((1, 1), (10, 10), zorder=0, label="the law", **_LINE)
    ax.legend()
    ax.set(xscale="log", yscale="log", xlabel="1 / (1 - R2)", ylabel="variance of rloo / corrected form's",
           title=f"The gain is {ratio.min():.2g} to {ratio.max():.2g} times what the law says")  # fmt: skip
    return fig


def explained_figure(table: pd.DataFrame, policy: str) -> Figure:
    """Variance within prompts that each family explains, by completions: a panel for each reward and stage."""
    rows = table.query("policy == @policy")
    grid = panels(sns.relplot, rows, f"R2 of every family, {policy}", kind="line", x="n", y="r2", hue="family",
                  style="family", markers=True, dashes=False, palette="tab10", col="reward", row="stage",
                  height=1.9)  # fmt: skip
    sizes = sorted(rows["n"].unique())
    grid.set(xscale="log", ylim=(-0.1, 1.05), xticks=sizes, xticklabels=sizes)
    grid.set_titles("{col_name}, {row_name}", size=9).set_axis_labels("completions", "R2")
    for ax in grid.axes.flat:
        ax.minorticks_off()
        ax.tick_params("x", labelsize=8)
    return grid.figure


def worth_figure(table: pd.DataFrame) -> Figure:
    """What one sample of each estimator is worth, alone and in the largest batch."""
    best = best_worths(table).query("estimator != 'rloo' and n in [n.min(), n.max()]")
    trained = np.where(best["stage"] == "trained", ", trained", "")
    ends = {end: best[end].astype(float).fillna(best["worth"]).clip(upper=1e4) for end in ("low", "high")}
    names = best["label"].replace({"plugin": "plug-in", "_w": ", w = ", r"_(\d+)$": r", fitted on \1"}, regex=True)
    best = best.assign(place=best["subject"].map(title) + trained, label=names, **ends).sort_values("label")
    colors = shades({label: label.split(",")[0].replace("-", "_") for label in best["label"].unique()})
    grid = panels(
        sns.catplot, with_ends(best, "worth"),
        "What one sample is worth, in samples of rloo (above the line: better; bars: 95 %)", row="n",
        kind="point", x="place", y="worth", hue="label", palette=colors, dodge=0.6, linestyle="none", capsize=0.05,
        height=2.5, aspect=2.8, err_kws=dict(linewidth=1), **INTERVAL,
    )  # fmt: skip
    for n, ax in grid.axes_dict.items():
        ax.axhline(1, **_LINE)
        ax.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        ax.set(ylim=(0, 1e4), xlabel="", title="one sample" if n == 1 else f"a sample in a batch of {n}")
    return grid.figure


def learning_figure(runs: pd.DataFrame, policy: str, target: float, x: str = "samples") -> Figure:
    """Held-out reward and KL against samples or seconds, a line of panels for each reward, ± one standard error."""
    labels = {"reward": "held-out reward", "kl": "KL, nats"}
    table = main_runs(runs).query("policy == @policy and target_kl == @target").assign(
        x=lambda rows: rows.groupby(["subject", "method", "step"])[x].transform("mean"),
        subject=lambda rows: rows["subject"].map(title),
    ).melt(["subject", "method", "x"], list(labels), var_name="what")  # fmt: skip
    heading = (
        f"Reward and KL (nats per completion) against {'samples' if x == 'samples' else 'time'}; dashed: the target"
    )
    grid = panels(sns.relplot, table, heading, x="x", y="value", row="subject", col="what", kind="line", errorbar="se",
                  height=1.9, aspect=2.0, facet_kws=dict(sharex="row", sharey=False), **by_method(table))  # fmt: skip
    for (subject, what), ax in grid.axes_dict.items():
        ax.set(title=subject if what == "reward" else "", ylabel=labels[what])
        if what == "kl":
            ax.axhline(target, **_LINE)
    grid.set_xlabels("completions" if x == "samples" else "seconds of training")
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


def tokens_figure(table: pd.DataFrame) -> Figure | None:
    """Tokens that a distilled reward likes most and least, twelve at either end; None for an empty table."""
    if table.empty:
        return None
    table = table.assign(subject=list(map(title, subject_names(table["policy"], table["reward"]))))
    rows = table[table["rank"].abs() <= 12].sort_values("value", ascending=False)
    rows = rows.assign(token=rows["token"].astype(str).str.replace("$", r"\$"), good=rows["value"] > 0)
    grid = panels(
        sns.catplot, rows, "Tokens that the reward likes most and least", kind="bar", x="value", y="token", hue="good",
        palette={True: color("good"), False: color("bad")}, legend=False, errorbar=None, col="subject",
        col_order=table["subject"].unique(), col_wrap=min(2, table["subject"].nunique()), sharex=False,
        sharey=False, height=5.32, aspect=0.8,
    )  # fmt: skip
    grid.set_titles("{col_name}").set_axis_labels("change in the completion's reward", "").tick_params("y", labelsize=8)
    return grid.figure
