"""Figures of the validation, from its tables."""

import numpy as np
import pandas as pd

from grade.experiments.measured import Tables, figures_of

WAYS = ("forward", "reverse", "two_batch")


def metrics(tables: Tables) -> dict[str, float]:
    """Every figure; changes of entropy in nats per completion, coverage as a share of the repetitions."""
    first = tables["first_order"]
    figures = {f"validation/slope_{way}": slope(first, way) for way in WAYS}
    figures |= {f"validation/ratio_error_{way}": abs(first[way].iloc[-1] / first.exact.iloc[-1] - 1) for way in WAYS}
    for name in ("plug_in", "jackknife"):
        figures |= figures_of(tables["coverage"], f"validation/coverage_{name}_b{{B}}", {"": name})
    return figures | {"validation/importance_bias_over_stderr_max": importance_bias(tables["importance"]).max()}


def importance_bias(table: pd.DataFrame) -> pd.Series:
    """Bias of importance sampling in standard errors over repetitions, row by row."""
    return ((table["mean"] - table.exact) / table.bias_stderr).abs()


def slope(table: pd.DataFrame, way: str) -> float:
    """Log-log slope of the prediction against the true change over the step sizes."""
    return float(np.polyfit(np.log(table.exact.abs()), np.log(table[way].abs()), 1)[0])
