"""Figures of the study, from its tables."""

from collections.abc import Sequence

import pandas as pd

from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS
from grade.experiments.estimators.measure.tables import Settings
from grade.experiments.measured import Tables, figures_of, finite

Values = dict[str, float | int | None]


def metrics(tables: Tables, settings: Settings) -> Values:
    """Every figure that is the same in every run; a number or an interval that does not exist is None.

    Bias and mse are of the enumerated policy; names that begin with ``after/`` are of the policy after training.
    """
    values: Values = {}
    if settings.enumerated:
        quality, ratios = tables["quality"], tables["mse_ratio"]
        short = (ratios.draws == max(settings.tiny_draws)) & (ratios.reward == "bag")
        named = ratios.assign(which=("_" + ratios.reward + "_m" + ratios.draws.astype(str)).mask(short, ""))
        ends = {"": "ratio", "_low": "low", "_high": "high"}
        values |= figures_of(named, "mse/gumbel_rao_over_ste{which}", ends)
        values["bias/unbiased_worst_in_stderr"] = worst_bias(quality, POLICY_GRADIENTS)
    worth = tables["worth"]
    worth = worth.assign(prefix=(worth.policy + "/").mask(worth.policy == "before", ""))
    chosen = worth[worth.estimator == settings.chosen.name]
    for name in ("worth", "crossover"):
        ends = {end: f"{name}{end}" for end in ("", "_low", "_high")}
        values |= figures_of(chosen, f"{{prefix}}{name}/{{reward}}", ends)
    return finite(values)


def worst_bias(table: pd.DataFrame, estimators: Sequence[str]) -> float:
    """Largest bias of these estimators in standard errors, along the truth or squared, over rewards."""
    rows = table[table.estimator.isin(estimators)]
    return float(max((rows.along / rows.along_stderr).abs().max(), (rows.bias2 / rows.bias2_stderr).abs().max()))
