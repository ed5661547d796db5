"""Figures of the experiment on scored text, from its tables.

A seed decides adapter, prompts and noise of every method alike, so methods are compared seed by seed.
"""

import json

import pandas as pd
from scipy.stats import t as student

from grade.experiments.frontier import estimates, paired_table
from grade.experiments.learning import AGAINST, REACHED, reach_table, rewards_at_kl
from grade.experiments.measured import Tables, figures_of, finite
from grade.experiments.rewards import number_of_texts
from grade.experiments.text_first.measure.tables import Settings

Values = dict[str, float | int | None]
QUALITY = ("reward", "gold", "outside", "distinct", "length", "kl")
"""What is told of completions at the end of runs."""


def metrics(tables: Tables, settings: Settings) -> Values:
    """Every figure that is the same in every run; a number or an interval that does not exist is None.

    ``samples_over_...`` without a method is of `auto` with texts; ``budget/...`` is of KL at the end of all runs.
    """
    runs = labelled(tables["runs"])
    figures: Values = {}
    for level in settings.kl_levels:
        table = differences(runs, level)
        columns = {"": "difference", "_low": "low", "_high": "high", "_stderr": "stderr", "_n": "n"}
        figures |= figures_of(table, f"{{method}}/{{subject}}/reward_at_{level:g}_over_rloo", columns)
    samples = runs.groupby(["subject", "method"], sort=False)["samples"].max()
    for (subject, method), number in samples.items():
        steers = method.startswith("offline")
        figures[f"{method}/{subject}/policy_samples"] = 0 if steers else int(number)
        figures[f"{method}/{subject}/steering_samples"] = int(number) if steers else 0
    reached = reach_table(at_headline(runs, settings), AGAINST)
    figures |= _ratios(reached, "samples_over_rloo")
    ends = last(runs)
    figures |= estimates(ends, "end/{subject}/{method}", {f"/{name}": name for name in QUALITY})
    return finite(figures | _budget(ends))


def labelled(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with their number of ``texts`` and all ``calls`` of the reward.

    With several sources in a subject, methods name theirs.
    """
    reading = runs["source"].ne("own")
    several = runs[reading].groupby("subject")["source"].nunique() > 1
    named = reading & runs["subject"].map(several).fillna(False).astype(bool)
    sources = "_" + runs["source"].astype(str).str.replace(":", "_")
    texts = runs["source"].astype(str).map(number_of_texts)
    calls = runs["samples"] + texts
    return runs.assign(method=runs["method"] + sources.where(named, ""), texts=texts, calls=calls)


def at_headline(runs: pd.DataFrame, settings: Settings) -> pd.DataFrame:
    """The runs of each subject at the target ``headline_level``, or at its largest one where it has no such."""
    level = settings.headline_level
    targets = runs.groupby("subject")["target_kl"].agg(lambda each: level if (each == level).any() else each.max())
    return runs[runs["target_kl"] == runs["subject"].map(targets)]


def last(runs: pd.DataFrame) -> pd.DataFrame:
    """The last evaluation of each run."""
    names = ["subject", "method", "target_kl", "seed"]
    return runs.sort_values("step", kind="stable").groupby(names, sort=False).tail(1).sort_index()


def differences(runs: pd.DataFrame, level: float) -> pd.DataFrame:
    """Rewards at one KL less `rloo`'s, seed by seed: `paired_table` with the ``low`` and ``high`` of 95 % intervals."""
    table = paired_table(rewards_at_kl(runs, [level]), [AGAINST])
    reach = table["stderr"].astype(float) * student.ppf(0.975, table["n"].astype(float) - 1)
    return table.assign(low=table["difference"] - reach, high=table["difference"] + reach)


def cost_table(runs: pd.DataFrame) -> pd.DataFrame:
    """What a run costs and where it ends, means over seeds."""
    ends = last(labelled(runs))
    columns = ["texts", "samples", "calls", "reward", "kl"]
    return ends.groupby(["subject", "method", "target_kl"], sort=False)[columns].mean().reset_index()


def shown_texts(runs: pd.DataFrame, subject: str, method: str) -> pd.DataFrame:
    """Completions of the same prompts before and after training, with their reward and the outside judge's verdict."""
    rows = runs[(runs["subject"] == subject) & (runs["method"] == method)].dropna(subset=["shown"])
    rows = rows[rows["source"] == rows["source"].iloc[0]].sort_values("step")
    columns = ["prompt", "text", "reward", "outside"]
    before, after = (pd.DataFrame(json.loads(rows["shown"].iloc[place]), columns=columns) for place in (0, -1))
    return before.merge(after.drop(columns="prompt"), left_index=True, right_index=True, suffixes=(" before", " after"))


def _ratios(table: pd.DataFrame, key: str) -> Values:
    prefixes = ["" if method == "auto_texts" else f"{method}/" for method in table["method"]]
    return figures_of(table.assign(prefix=prefixes), f"{{prefix}}{key}/{{subject}}", REACHED)


def _budget(ends: pd.DataFrame) -> Values:
    error = (ends["kl"] / ends["target_kl"] - 1).abs()
    return {"budget/worst_rel_error": error.max(), "budget/mean_rel_error": error.mean(), "budget/runs": len(error)}
