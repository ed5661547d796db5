"""Figures of the experiment on any reward, from its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from grade.experiments.any_reward import learning
from grade.experiments.frontier import estimate_figures, paired_figures, reward_at_kl
from grade.experiments.measured import Tables

if TYPE_CHECKING:
    from grade.experiments.any_reward.measure.tables import Settings

Values = dict[str, float | int | None]

OURS = ("auto", "plug_in", "corrected")
"""Methods on a distilled reward; `auto` has the figures without its name."""
PAIRED = ("ste", "st", "rloo")
"""Methods that the others are compared with at equal KL, where they were run."""
_ENDS = ("", "_low", "_high")


def metrics(tables: Tables, settings: Settings) -> Values:
    """Every figure that is the same in every run; a number or an interval that does not exist is None.

    Args:
        tables: The experiment's.
        settings: What they were measured with.

    Returns:
        Names to values; what a table does not hold has no figure. Subjects are named as in `subject_name`.

        - ``bias/...``: of the corrected form, with every critic and step: the worst in standard errors, among how many
          tests, its p, n completions a critic; ``bias/exact_worst`` over the gradient; ``law/...``.
        - ``explained/<subject>/<family>_<n>`` and ``_stderr``; ``.../best_<n>``; ``.../from_n``, the least n at which
          the best family explains something (two standard errors; None: never).
        - ``worth/<subject>/plugin_<N>``, of the additive family that explains most, with ``_low`` and ``_high``; below
          ``worth_at_<n>/`` in a batch of n; of the other estimators too.
        - ``samples_over_rloo/<subject>`` with ``_low``, ``_high``, ``_n``, ``_censored``, and ``kl_over_rloo/...``, at
          the target ``headline_kl``; for other methods below ``<method>/``, for other targets below
          ``target_<kl>/``, for fewer completions a step below ``batch_<completions>/``.
        - ``end/...`` rewards, judges and KL at the end of runs; ``reward_at_kl/<subject>/<kl>/<method>``;
          ``paired/<subject>/<method>_minus_<other>`` at KL ``headline_level``.
    """
    found: Values = _bias(tables) | explained_figures(tables["explained"]) | worth_figures(tables["worth"])
    for name, completions, most, curves in subjects(tables["runs"]):
        prefix = "" if completions == most else f"batch_{completions}/"
        for target in curves["target_kl"].unique():
            part = "" if target == settings.headline_kl else f"target_{target:g}/"
            found |= sample_figures(curves[curves["target_kl"] == target], name, prefix + part)
        if not prefix:
            found |= end_figures(curves, name, settings.headline_kl)
            found |= kl_figures(curves, name, settings.kl_levels, settings.headline_level)
    return {key: _finite(value) for key, value in found.items()}


def timed_metrics(tables: Tables, settings: Settings) -> Values:
    """Figures of seconds.

    Args:
        tables: The experiment's.
        settings: What they were measured with.

    Returns:
        ``cost/fit_share_<policy>`` of a step's seconds, and ``cost/fit_share``, that of the policy whose steps are
        slowest: the fit takes as long on all. ``cost/completions``, the fewest in the store;
        ``seconds/<subject>/<method>`` of training, with ``_stderr`` and ``_n``.
    """
    cost, found = tables["fit_cost"], {}
    sums = cost.groupby("policy", sort=False)[["fit_seconds", "step_seconds"]].sum()
    shares = sums["fit_seconds"] / sums["step_seconds"]
    found |= {
        "cost/fit_share": shares[cost.loc[cost["step_seconds"].idxmax(), "policy"]],
        "cost/completions": int(cost["completions"].min()),
    }
    found |= {f"cost/fit_share_{policy}": share for policy, share in shares.items()}
    for name, completions, most, curves in subjects(tables["run_seconds"]):
        curves = curves[curves["target_kl"] == settings.headline_kl]
        for method, runs in curves.groupby("method", sort=False) if completions == most else ():
            found |= estimate_figures(f"seconds/{name}/{method}", runs.groupby("seed")["seconds"].max())
    return {key: _finite(value) for key, value in found.items()}


def subject_name(policy: str, reward: str) -> str:
    """The short name of a policy and its reward.

    >>> [subject_name(*pair) for pair in (("tiny", "gold"), ("smollm2", "rule"), ("tiny", "rule"), ("sums", "sums"))]
    ['tiny_gold', 'smollm2_rule', 'rule', 'sums']
    >>> subject_name("tiny", "smollm2_trunk")
    'text'
    """
    if policy == "smollm2":
        return f"smollm2_{reward}"
    return {"smollm2_trunk": "text", "rule": "rule", "sums": "sums"}.get(reward, f"tiny_{reward}")


def subjects(runs: pd.DataFrame) -> Iterator[tuple[str, int, int, pd.DataFrame]]:
    """Name, completions a step, the most completions a step of this subject, and the curves of each."""
    for (policy, reward), rows in runs.groupby(["policy", "trained_on"], sort=False):
        for completions, curves in rows.groupby("completions", sort=False):
            yield (subject_name(policy, reward), int(completions), int(rows["completions"].max()),
                   curves.reset_index(drop=True))  # fmt: skip


def main_runs(runs: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The curves of each subject at the most completions a step."""
    return {name: curves for name, completions, most, curves in subjects(runs) if completions == most}


def explained_figures(table: pd.DataFrame) -> Values:
    """R2; a trained policy's below ``trained/``."""
    found: Values = {}
    for (policy, stage, reward), rows in table.groupby(["policy", "stage", "reward"], sort=False):
        key = ("trained/" if stage == "trained" else "") + f"explained/{subject_name(policy, reward)}"
        for row in rows.itertuples():
            found |= {f"{key}/{row.family}_{row.n}": row.r2, f"{key}/{row.family}_{row.n}_stderr": row.r2_stderr}
        known = rows.dropna(subset=["r2"])
        best = known.loc[known.groupby("n")["r2"].idxmax()]
        found |= {f"{key}/best_{row.n}": row.r2 for row in best.itertuples()}
        something = best[best["r2"] > 2 * best["r2_stderr"]]
        found[f"{key}/from_n"] = int(something["n"].min()) if len(something) else None
    return found


def best_worths(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the table of worth, of distilled rewards those of the additive family that explains most.

    That is the family of which the method would take the gradient.
    """
    from grade.gradients.distilled.families import ADDITIVE

    names = ["policy", "stage", "reward", "estimator", "fitted", "weight", "n"]
    distilled = table["estimator"].isin(["plugin", "corrected"])
    additive = table[distilled & table["family"].isin(ADDITIVE)].dropna(subset=["r2"])
    best = additive.loc[additive.groupby(names, sort=False)["r2"].idxmax()]
    return pd.concat([table[~distilled], best]).sort_index()


def worth_label(estimator: str, fitted: int, weight: float) -> str:
    """A row of the table of worth in one word.

    >>> worth_label("plugin", 256, 0.0), worth_label("corrected", 256, 0.3), worth_label("st", 0, 1.0)
    ('plugin_256', 'corrected_w0.3_256', 'st')
    """
    part = f"_w{weight:g}" if estimator == "corrected" and weight != 1 else ""
    return f"{estimator}{part}" + (f"_{fitted}" if fitted else "")


def worth_figures(table: pd.DataFrame) -> Values:
    """Worth of one sample of every estimator, and in batches."""
    found: Values = {}
    for row in best_worths(table).itertuples():
        key = ("trained/" if row.stage == "trained" else "") + ("worth" if row.n == 1 else f"worth_at_{row.n}")
        key += f"/{subject_name(row.policy, row.reward)}/{worth_label(row.estimator, row.fitted, row.weight)}"
        found |= {key + end: getattr(row, name) for end, name in zip(_ENDS, ("worth", "low", "high"), strict=True)}
        if row.n == 1 and row.estimator != "rloo":
            found[f"{key}_cosine"] = row.cosine_mean
    return found


def sample_figures(curves: pd.DataFrame, name: str, prefix: str = "") -> Values:
    """Samples to the final reward of `rloo` over its own, and the KL there over its KL, of runs at one target.

    Args:
        curves: Runs of one subject, target and number of completions a step.
        name: Of the subject.
        prefix: Put before every name.

    Returns:
        The figures; none if there was no `rloo`. A censored seed counts with the samples of its whole run, so that the
        ratio is a lower bound. Where `rloo` gained nothing there is no goal, and n is 0.
    """
    if learning.AGAINST not in set(curves["method"]):
        return {}
    table = learning.sample_ratios(curves).set_index("method")
    found: Values = {}
    for method in dict.fromkeys(curves["method"]):
        if method == learning.AGAINST:
            continue
        key = prefix + ("" if method == "auto" else f"{method}/")
        samples, kl = f"{key}samples_over_rloo/{name}", f"{key}kl_over_rloo/{name}"
        found[f"{samples}_n"] = 0
        if method in table.index:
            row = table.loc[method]
            found |= {samples: row.ratio, f"{samples}_low": row.low, f"{samples}_high": row.high,
                      f"{samples}_n": int(row.n), f"{samples}_censored": int(row.censored),
                      f"{samples}_of_run": row.of_run, kl: row.kl_ratio, f"{kl}_low": row.kl_low,
                      f"{kl}_high": row.kl_high}  # fmt: skip
    return found


def batch_ratios(runs: pd.DataFrame, target: float, method: str = "auto") -> dict[str, pd.Series]:
    """By subject the samples of a method over `rloo`'s against completions a step, at one target for KL."""
    found: dict[str, dict[int, float]] = {}
    for name, completions, _, curves in subjects(runs):
        curves = curves[curves["target_kl"] == target]
        if {learning.AGAINST, method} <= set(curves["method"]):
            table = learning.sample_ratios(curves).set_index("method")["ratio"]
            if method in table.index:
                found.setdefault(name, {})[completions] = table[method]
    return {name: pd.Series(values).sort_index() for name, values in found.items()}


def end_figures(curves: pd.DataFrame, name: str, target: float) -> Values:
    """Reward, judge and KL at the end of runs at one target."""
    found: Values = {}
    table = learning.ends(curves[curves["target_kl"] == target])
    for method, rows in table.groupby("method", sort=False):
        for what in ("reward", "gain", "gold", "kl"):
            values = rows[what].dropna()
            if len(values):
                found |= estimate_figures(f"end/{name}/{method}/{what}", values)
    return found


def kl_figures(curves: pd.DataFrame, name: str, levels: Sequence[float], headline: float) -> Values:
    """Rewards at equal KL, and their differences at one level; none of methods with a single seed."""
    seeds = curves.groupby("method")["seed"].nunique()
    curves = curves[curves["method"].isin(seeds.index[seeds > 1])]
    found: Values = {}
    for level in levels:
        rewards = reward_at_kl(curves, level, "target_kl") if len(curves) else {}
        for method, values in rewards.items():
            found |= estimate_figures(f"reward_at_kl/{name}/{level:g}/{method}", values.values())
        for against in PAIRED if level == headline else ():
            figures = paired_figures(rewards, against, "x")
            found |= {f"paired/{name}/{key.split('/')[1]}{key.split('/x')[1]}": v for key, v in figures.items()}
    return found


def _bias(tables: Tables) -> Values:
    from grade.experiments.any_reward.measure.enumerated import worst_deviation

    bias, exact, law = tables["bias"], tables["exact"], tables["law"]
    worst = worst_deviation(bias)
    corrected = exact[exact["estimator"] == "corrected"]
    gap = law["gain"] / law["law"]
    found: Values = {
        "bias/corrected_worst_in_stderr": worst["worst"], "bias/tests": worst["tests"], "bias/p": worst["p"],
        "bias/n": int(bias["n"].min()), "bias/exact_worst": corrected["bias"].max(),
        "bias/critics": corrected["critic"].nunique(), "law/gain_over_law_low": gap.min(),
        "law/gain_over_law_high": gap.max(), "law/best_gain": law["gain"].max(), "law/best_r2": law["r2"].max(),
    }  # fmt: skip
    fitted = exact[exact["critic"].str.endswith("fitted") & exact["additive"]]
    for row in fitted.itertuples():
        key = f"{row.critic.removesuffix(' fitted')}/{row.estimator}"
        found |= {f"bias/{key}/{name}": getattr(row, name) for name in ("bias", "variance", "mse")}
    rloo = exact[exact["estimator"] == "rloo"].iloc[0]
    return found | {f"bias/rloo/{name}": rloo[name] for name in ("bias", "variance", "mse")}


def _finite(value: Any) -> float | int | None:
    """None for what does not exist: None itself, or NaN or an infinity."""
    return value if value is not None and math.isfinite(value) else None
