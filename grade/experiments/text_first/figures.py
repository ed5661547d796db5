"""Figures of the experiment on scored text, from its tables."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from grade.experiments.learning import title
from grade.experiments.plotting import SERIES, by_method, color, panels
from grade.experiments.text_first.metrics import labelled, last

_LINE = dict(color=color("line"), linewidth=1, linestyle="--")
_LEFT_OUT = ("grpo", "ppo")
_QUALITY = {
    "reward": "reward", "gold": "gold judge", "outside": "VADER's sentiment", "distinct": "distinct bigrams",
    "length": "words",
}  # fmt: skip


def _means(runs: pd.DataFrame, subjects: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Means over seeds at each evaluation of the methods of some subjects, and the reward's standard error."""
    rows = runs[runs["subject"].isin(subjects)]
    groups = rows.groupby(["subject", "method", "step"], sort=False)
    return groups[list(columns)].mean().assign(error=groups["reward"].sem()).reset_index()


def _best(table: pd.DataFrame) -> pd.DataFrame:
    """Evaluations by KL, without those that have less reward than one at less KL; the last one always."""
    table = table.sort_values(["subject", "method", "kl"], kind="stable")
    groups = table.groupby(["subject", "method"], sort=False)
    kept = (table["reward"] >= groups["reward"].cummax()) | (table["step"] == groups["step"].transform("max"))
    return table[kept]


def frontier_figure(runs: pd.DataFrame, subjects: Sequence[str], levels: Sequence[float]) -> Figure:
    """The best reward so far against KL, a panel for each subject; bars: one standard error over seeds.

    Numbers are completions of the policy: at the end, and at the evaluations nearest to lower levels. Of methods that
    only sample, `rloo` and `auto` are drawn, and those that differentiate the reward.
    """
    table = _means(labelled(runs), subjects, ["kl", "reward", "samples"]).query("method not in @_LEFT_OUT")
    methods = by_method(table)
    table = _best(table)
    table["subject"] = table["subject"].map(title)
    text = "Best reward by KL (numbers: completions sampled)"
    grid = panels(sns.relplot, table, text, x="kl", y="reward", col="subject", col_wrap=min(2, len(subjects)),
                  col_order=[*map(title, subjects)], kind="line", sort=False, height=3.4, aspect=1.25,
                  facet_kws=dict(sharex=False, sharey=False), markersize=7, **methods)  # fmt: skip
    for name, ax in grid.axes_dict.items():
        shown = table[table["subject"] == name]
        for method, rows in shown.groupby("method", sort=False):
            ax.errorbar(rows["kl"], rows["reward"], rows["error"], fmt="none", ecolor=color(method), elinewidth=1)
        for level in levels:
            nearest = (shown["kl"] - level).abs().groupby(shown["method"]).idxmin()
            if level == max(levels):
                nearest = shown.groupby("method")["step"].idxmax()
            points = shown.loc[nearest].sort_values("reward")
            # The lowest is told below, all others above: of equal numbers one.
            for place, row in enumerate(points.drop_duplicates("samples", keep="first").itertuples()):
                ax.annotate(f"{row.samples:,.0f}", (row.kl, row.reward), (0, 9 if place else -15),
                            textcoords="offset points", ha="center", fontsize=8, color=color(row.method))  # fmt: skip
        ax.margins(y=0.12)
        ax.set_title(name)
    grid.set_axis_labels("KL, nats per completion", "held-out reward")
    return grid.figure


def quality_figure(runs: pd.DataFrame, subjects: Sequence[str]) -> Figure:
    """What completions are like against KL: the reward, judges, diversity and length, a line of panels per subject."""
    table = _means(labelled(runs), subjects, ["kl", *_QUALITY])
    table = table.melt(["subject", "method", "step", "kl"], list(_QUALITY), var_name="what")
    table = table[(table["what"] != "gold") | ~table["subject"].str.contains("gold")]
    table = table.assign(subject=table["subject"].map(title), what=table["what"].map(_QUALITY)).dropna(subset=["value"])
    grid = panels(sns.relplot, table, "Is the gain real text? Every judge against KL", x="kl", y="value", col="what",
                  row="subject", kind="line", height=2.3, aspect=1.0,
                  facet_kws=dict(sharey=False, margin_titles=True), **by_method(table))  # fmt: skip
    grid.set_titles(col_template="{col_name}", row_template="{row_name}").set_axis_labels("KL, nats", "")
    return grid.figure


def sources_figure(runs: pd.DataFrame) -> Figure | None:
    """Reward at the end of `offline` against the number of texts, of each kind; None without such runs."""
    ends = last(labelled(runs)).query("subject == 'sources'")
    if ends.empty:
        return None
    reference = ends["source"].astype(str).str.startswith("reference")
    ends = ends.assign(kind=reference.map({True: "the reference's completions", False: "human text"}))
    fig, ax = plt.subplots(figsize=(6.0, 3.6))
    sns.lineplot(ends, x="texts", y="reward", hue="kind", style="kind", markers=True, dashes=False, errorbar="se",
                 err_style="bars", markersize=8, palette=SERIES[: ends["kind"].nunique()], ax=ax)  # fmt: skip
    sizes = sorted(ends["texts"].unique())
    ax.set(xscale="log", xlabel="scored texts", ylabel="held-out reward",
           title=f"offline at {ends['target_kl'].iloc[0]:g} nats, by the texts that it had")  # fmt: skip
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.minorticks_off()
    ax.legend(title="")
    return fig
