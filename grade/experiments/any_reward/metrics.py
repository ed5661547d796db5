"""Figures of the experiment on any reward, from its tables."""

import numpy as np
import pandas as pd
from scipy.stats import norm

from grade.experiments import learning
from grade.experiments.any_reward.measure.tables import Settings
from grade.experiments.frontier import paired_figures
from grade.experiments.measured import Tables, figures_of, finite
from grade.gradients.distilled.families import ADDITIVE

Values = dict[str, float | int | None]


def metrics(tables: Tables, settings: Settings) -> Values:
    """Every figure that is the same in every run; a number or an interval that does not exist is None.

    What a table does not hold has no figure. Subjects are named as in `learning.subject_names`. ``from_n`` is the least
    number of completions at which the best family explains something (two standard errors; None: never). Samples are
    those of `auto`, at the target ``headline_kl`` and the most completions per step.
    """
    figures = _bias(tables) | _explained(tables["explained"]) | _worth(tables["worth"])
    ratios = learning.ratio_table(tables["runs"])
    ratios = ratios.query("most and method == 'auto' and target_kl == @settings.headline_kl")
    samples, of_samples = "samples_over_rloo/{subject}", {"_censored": "censored", "_of_run": "of_run"}
    figures |= figures_of(ratios, samples, {"_n": "n"})
    figures |= figures_of(ratios.query("n > 0"), samples, {"": "ratio", "_low": "low", "_high": "high"} | of_samples)
    pairs = learning.paired_rewards(tables["runs"], settings.headline_level)
    figures |= paired_figures(pairs, "paired/{subject}/{method}_minus_{against}")
    return finite(figures)


def timed_metrics(tables: Tables) -> Values:
    """Figures of seconds: the fit's share of a step's.

    ``cost/fit_share`` is that of the policy whose steps are slowest: the fit takes as long on all.
    ``cost/completions`` are the fewest in the store.
    """
    cost = tables["fit_cost"]
    sums = cost.groupby("policy", sort=False)[["fit_seconds", "step_seconds"]].sum()
    shares = sums["fit_seconds"] / sums["step_seconds"]
    figures = {f"cost/fit_share_{policy}": share for policy, share in shares.items()}
    figures["cost/fit_share"] = shares[cost.loc[cost["step_seconds"].idxmax(), "policy"]]
    return finite(figures | {"cost/completions": int(cost["completions"].min())})


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
    return best.assign(subject=learning.subject_names(best["policy"], best["reward"]), label=labels)


def _prefix(table: pd.DataFrame) -> np.ndarray:
    return np.where(table["stage"] == "trained", "trained/", "")


def _explained(table: pd.DataFrame) -> Values:
    """From how many completions on something is explained; of a trained policy below ``trained/``."""
    subjects = learning.subject_names(table["policy"], table["reward"])
    table = table.assign(key=_prefix(table) + pd.Series([f"explained/{subject}" for subject in subjects]))
    known = table.dropna(subset=["r2"])
    best = known.loc[known.groupby(["key", "n"])["r2"].idxmax()]
    something = best[best["r2"] > 2 * best["r2_stderr"]].groupby("key")["n"].min()
    return {f"{key}/from_n": something.get(key) for key in table["key"].unique()}


def _worth(table: pd.DataFrame) -> Values:
    best = best_worths(table)
    best = best.assign(key=_prefix(best) + best["n"].map(lambda n: "worth" if n == 1 else f"worth_at_{n}"))
    return figures_of(best, "{key}/{subject}/{label}", {"": "worth", "_low": "low", "_high": "high"})


def worst_deviation(table: pd.DataFrame) -> dict[str, float]:
    """The largest bias in standard errors, of how many tests, and the p of one as large if they are independent."""
    worst, tests = float(table["z"].abs().max()), len(table)
    return dict(worst=worst, tests=tests, p=float(1 - (1 - 2 * norm.sf(worst)) ** tests))


def _bias(tables: Tables) -> Values:
    bias, exact, law = tables["bias"], tables["exact"], tables["law"]
    worst = worst_deviation(bias)
    corrected = exact[exact["estimator"] == "corrected"]
    gap = law["gain"] / law["law"]
    fitted = exact[exact["critic"].str.endswith("fitted") & exact["additive"]]
    fitted = fitted.assign(name=fitted["critic"].str.removesuffix(" fitted") + "/" + fitted["estimator"])
    rloo = exact[exact["estimator"] == "rloo"].iloc[:1].assign(name="rloo")
    return {
        "bias/corrected_worst_in_stderr": worst["worst"], "bias/tests": worst["tests"], "bias/p": worst["p"],
        "bias/n": int(bias["n"].min()), "bias/exact_worst": corrected["bias"].max(),
        "bias/critics": corrected["critic"].nunique(), "law/gain_over_law_low": gap.min(),
        "law/gain_over_law_high": gap.max(), "law/best_gain": law["gain"].max(), "law/best_r2": law["r2"].max(),
    } | figures_of(pd.concat([fitted, rloo]), "bias/{name}", ["bias", "variance", "mse"])  # fmt: skip
