"""Figures of document 004."""

from collections.abc import Mapping

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from grade.experiments.plotting import SERIES, color, panels, plain_log_ticks


def peaks_figure(lengths: pd.DataFrame, stated: Mapping[int, tuple[float, float]]) -> Figure:
    """Traced peaks of PPO and Intuitor against length on a log axis, beside the document's GB of both by tokens."""
    rows = [dict(tokens=n, step=f"{method}, as stated", peak_gb=gb) for n in stated if n in set(lengths.tokens)
            for method, gb in zip(("PPO", "Intuitor"), stated[n], strict=True)]  # fmt: skip
    shown = pd.concat([pd.DataFrame(rows), lengths], ignore_index=True)
    shown[["method", "logits"]] = shown.step.str.split(", ", expand=True).to_numpy()
    # Both methods have the same peak: PPO's marks are larger, so that both show.
    grid = panels(
        sns.relplot, shown, "Traced, Intuitor needs no more memory than PPO", kind="line", x="tokens", y="peak_gb",
        hue="method", palette={"PPO": color("ppo"), "Intuitor": SERIES[0]}, style="logits",
        style_order=["logits in chunks", "dense logits", "as stated"], markers=True, size="method",
        sizes={"PPO": 4.5, "Intuitor": 1.5}, height=4, aspect=1.8,
    )  # fmt: skip
    names = {n: f"{n / 1024:g}K" if n >= 1024 else str(n) for n in sorted(lengths.tokens.unique())}
    grid.set(yscale="log", xlabel="tokens of a sequence", ylabel="peak of one GPU, GB")
    grid.ax.set_xticks(list(names), list(names.values()))
    grid.ax.xaxis.set_minor_formatter(NullFormatter())
    plain_log_ticks(grid.ax)
    return grid.figure


def certainty_figure(sweep: pd.DataFrame, scores: pd.DataFrame) -> Figure:
    """Self-certainty and the document's formula: by the height of one logit; of completions, less the prompt's mean."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    names = {"published": "self-certainty + log V", "document": "document's formula"}
    table = sweep.rename(columns=names).melt("peak", list(names.values()), "formula", "nats")
    sns.lineplot(table, x="peak", y="nats", hue="formula", palette=SERIES[:2], style="formula", markers=True,
                 dashes=False, ax=left)  # fmt: skip
    left.set(title="One confident token hardly moves the formula", xlabel="one logit, raised to",
             ylabel="score of the row, nats", ylim=(0, None))  # fmt: skip
    left.legend(title=None)
    centred = scores[["self_certainty", "document"]] - scores.groupby("group").transform("mean")
    sns.scatterplot(centred, x="self_certainty", y="document", s=14, alpha=0.6, color=SERIES[1], linewidth=0,
                    label="one completion", ax=right)  # fmt: skip
    right.axline((0, 0), slope=1, color=color("line"), linewidth=1, linestyle="--", label="equal scores")
    right.set(title="On real text it scores on another scale", ylabel="formula less the prompt's mean, nats",
              xlabel="self-certainty less the prompt's mean, nats")  # fmt: skip
    right.legend()
    return fig
