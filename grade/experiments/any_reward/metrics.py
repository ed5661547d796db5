"""Figures of the experiment on any reward, from its tables."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from grade.experiments.any_reward import learning
from grade.experiments.any_reward.learning import subject_name
from grade.experiments.any_reward.measure.enumerated import worst_deviation
from grade.experiments.any_reward.measure.tables import Settings
from grade.experiments.frontier import estimate_figures, reward_at_kl
from grade.experiments.measured import Tables
from grade.gradients.distilled.families import ADDITIVE

Values = dict[str, float | int | None]


def metrics(tables: Tables, settings: Settings) -> Values:
    """Every figure that is the same in every run; a number or an interval that does not exist is None.

    What a table does not hold has no figure. Subjects are named as in `learning.subject_name`.

        - ``bias/...``: of the corrected form, with every critic and step: the worst in standard errors, among how many
          tests, its p, n completions per critic; ``bias/exact_worst`` over the gradient; ``law/...``.
        - ``explained/<subject>/<family>_<n>`` and ``_stderr``; ``.../best_<n>``; ``.../from_n``, the least n at which
          the best family explains something (two standard errors; None: never).
        - ``worth/<subject>/plugin_<N>``, of the additive family that explains most, with ``_low`` and ``_high``; below
          ``worth_at_<n>/`` in a batch of n; of the other estimators too.
        - ``samples_over_rloo/<subject>`` with ``_low``, ``_high``, ``_n``, ``_censored``, and ``kl_over_rloo/...``, at
          the target ``headline_kl``; for methods other than `auto` below ``<method>/``, for other targets below
          ``target_<kl>/``, for fewer completions per step below ``batch_<completions>/``.
        - ``end/...`` rewards, judges and KL at the end of runs; ``reward_at_kl/<subject>/<kl>/<method>``;
          ``paired/<subject>/<method>_minus_<other>`` at KL ``headline_level``.
    """
    figures = _bias(tables) | _explained(tables["explained"]) | _worth(tables["worth"])
    for row in learning.ratio_table(tables["runs"]).itertuples():
        if row.method == learning.AGAINST:
            continue
        prefix = "" if row.most else f"batch_{row.completions}/"
        prefix += "" if row.target_kl == settings.headline_kl else f"target_{row.target_kl:g}/"
        prefix += "" if row.method == "auto" else f"{row.method}/"
        samples, kl = (f"{prefix}{name}_over_rloo/{row.subject}" for name in ("samples", "kl"))
        figures[f"{samples}_n"] = row.n
        if row.n:
            figures |= {samples: row.ratio, f"{samples}_low": row.low, f"{samples}_high": row.high,
                        f"{samples}_censored": row.censored, f"{samples}_of_run": row.of_run, kl: row.kl_ratio,
                        f"{kl}_low": row.kl_low, f"{kl}_high": row.kl_high}  # fmt: skip
    for name, curves in learning.main_runs(tables["runs"]).items():
        at_target = learning.ends(curves[curves["target_kl"] == settings.headline_kl])
        for method, rows in at_target.groupby("method", sort=False):
            for what in ("reward", "gain", "gold", "kl"):
                if len(values := rows[what].dropna()):
                    figures |= estimate_figures(f"end/{name}/{method}/{what}", values)
        curves = learning.several_seeds(curves)
        for level in settings.kl_levels if len(curves) else ():
            for method, values in reward_at_kl(curves, level, "target_kl").items():
                figures |= estimate_figures(f"reward_at_kl/{name}/{level:g}/{method}", values.values())
    for row in learning.paired_table(tables["runs"], settings.headline_level).itertuples():
        key = f"paired/{row.subject}/{row.method}_minus_{row.against}"
        figures |= {key: row.difference, f"{key}_n": row.n}
        more = {f"{key}_stderr": row.stderr, f"{key}_p": row.p}
        figures |= {name: value for name, value in more.items() if not pd.isna(value)}
    return {key: _finite(value) for key, value in figures.items()}


def timed_metrics(tables: Tables, settings: Settings) -> Values:
    """Figures of seconds: of training, and the fit's share of a step's.

    ``cost/fit_share`` is that of the policy whose steps are slowest: the fit takes as long on all.
    ``cost/completions`` are the fewest in the store.
    """
    cost = tables["fit_cost"]
    sums = cost.groupby("policy", sort=False)[["fit_seconds", "step_seconds"]].sum()
    shares = sums["fit_seconds"] / sums["step_seconds"]
    figures = {f"cost/fit_share_{policy}": share for policy, share in shares.items()}
    figures["cost/fit_share"] = shares[cost.loc[cost["step_seconds"].idxmax(), "policy"]]
    figures["cost/completions"] = int(cost["completions"].min())
    for name, curves in learning.main_runs(tables["run_seconds"]).items():
        for method, runs in curves[curves["target_kl"] == settings.headline_kl].groupby("method", sort=False):
            figures |= estimate_figures(f"seconds/{name}/{method}", runs.groupby("seed")["seconds"].max())
    return {key: _finite(value) for key, value in figures.items()}


def best_worths(table: pd.DataFrame) -> pd.DataFrame:
    """The table of worth with a column ``subject`` and a ``label`` for each estimator, its N and its weight.

    Of distilled rewards those rows of the additive family that explains most: the method would take its gradient.
    """
    names = ["policy", "stage", "reward", "estimator", "fitted", "weight", "n"]
    distilled = table["estimator"].isin(["plugin", "corrected"])
    additive = table[distilled & table["family"].isin(ADDITIVE)].dropna(subset=["r2"])
    best = additive.loc[additive.groupby(names, sort=False)["r2"].idxmax()]
    best = pd.concat([table[~distilled], best]).sort_index()
    labels = [row.estimator + (f"_w{row.weight:g}" if row.estimator == "corrected" and row.weight != 1 else "")
              + (f"_{row.fitted}" if row.fitted else "") for row in best.itertuples()]  # fmt: skip
    return best.assign(subject=list(map(subject_name, best["policy"], best["reward"])), label=labels)


def _explained(table: pd.DataFrame) -> Values:
    """R2; a trained policy's below ``trained/``."""
    figures: Values = {}
    for (policy, stage, reward), rows in table.groupby(["policy", "stage", "reward"], sort=False):
        key = ("trained/" if stage == "trained" else "") + f"explained/{subject_name(policy, reward)}"
        for row in rows.itertuples():
            figures |= {f"{key}/{row.family}_{row.n}": row.r2, f"{key}/{row.family}_{row.n}_stderr": row.r2_stderr}
        known = rows.dropna(subset=["r2"])
        best = known.loc[known.groupby("n")["r2"].idxmax()]
        figures |= {f"{key}/best_{row.n}": row.r2 for row in best.itertuples()}
        something = best[best["r2"] > 2 * best["r2_stderr"]]
        figures[f"{key}/from_n"] = int(something["n"].min()) if len(something) else None
    return figures


def _worth(table: pd.DataFrame) -> Values:
    figures: Values = {}
    for row in best_worths(table).itertuples():
        key = ("trained/" if row.stage == "trained" else "") + ("worth" if row.n == 1 else f"worth_at_{row.n}")
        key += f"/{row.subject}/{row.label}"
        figures |= {key: row.worth, f"{key}_low": row.low, f"{key}_high": row.high}
        if row.n == 1 and row.estimator != "rloo":
            figures[f"{key}_cosine"] = row.cosine_mean
    return figures


def _bias(tables: Tables) -> Values:
    bias, exact, law = tables["bias"], tables["exact"], tables["law"]
    worst = worst_deviation(bias)
    corrected = exact[exact["estimator"] == "corrected"]
    gap = law["gain"] / law["law"]
    figures: Values = {
        "bias/corrected_worst_in_stderr": worst["worst"], "bias/tests": worst["tests"], "bias/p": worst["p"],
        "bias/n": int(bias["n"].min()), "bias/exact_worst": corrected["bias"].max(),
        "bias/critics": corrected["critic"].nunique(), "law/gain_over_law_low": gap.min(),
        "law/gain_over_law_high": gap.max(), "law/best_gain": law["gain"].max(), "law/best_r2": law["r2"].max(),
    }  # fmt: skip
    fitted = exact[exact["critic"].str.endswith("fitted") & exact["additive"]]
    rloo = exact[exact["estimator"] == "rloo"].iloc[:1].assign(critic="rloo")
    for row in pd.concat([fitted, rloo]).itertuples():
        key = "bias/rloo" if row.critic == "rloo" else f"bias/{row.critic.removesuffix(' fitted')}/{row.estimator}"
        figures |= {f"{key}/{name}": getattr(row, name) for name in ("bias", "variance", "mse")}
    return figures


def _finite(value: Any) -> float | int | None:
    """None for what does not exist: None itself, or NaN or an infinity."""
    return value if value is not None and math.isfinite(value) else None
