"""Figures of the validation, from its tables."""

from __future__ import annotations

import numpy as np
import pandas as pd

from grade.experiments.measured import Tables

WAYS = ("forward", "reverse", "two_batch")


def metrics(tables: Tables) -> dict[str, float]:
    """Every figure; changes of entropy in nats per completion, coverage as a share of the repetitions."""
    first, coverage, importance = tables["first_order"], tables["coverage"], tables["importance"]
    figures = {f"validation/slope_{way}": slope(first, way) for way in WAYS}
    figures |= {f"validation/ratio_error_{way}": abs(first[way].iloc[-1] / first.exact.iloc[-1] - 1) for way in WAYS}
    for row in coverage.itertuples():
        figures |= {f"validation/coverage_{name}_b{row.B}": getattr(row, name) for name in ("plug_in", "jackknife")}
        figures[f"validation/u_bias_over_stderr_b{row.B}"] = (row.mean - row.truth) / row.stderr
    figures["validation/repetitions"] = int(coverage.repetitions.iloc[0])
    whole, prefix = (importance[importance.way == way].set_index("eta") for way in ("whole", "prefix"))
    ratio = whole.stderr / whole.sd
    return figures | {
        "validation/importance_bias_over_stderr_max": importance_bias(importance).max(),
        "validation/importance_stderr_over_sd_min": ratio.min(),
        "validation/importance_stderr_over_sd_max": ratio.max(),
        **{f"validation/prefix_over_whole_sd/{eta:g}": prefix.sd[eta] / whole.sd[eta] for eta in whole.index},
        "validation/importance_repetitions": int(importance.repetitions.iloc[0]),
    }


def importance_bias(table: pd.DataFrame) -> pd.Series:
    """Bias of importance sampling in standard errors over repetitions, row by row."""
    return ((table["mean"] - table.exact) / table.bias_stderr).abs()


def slope(table: pd.DataFrame, way: str) -> float:
    """Log-log slope of the prediction against the true change over the step sizes."""
    return float(np.polyfit(np.log(table.exact.abs()), np.log(table[way].abs()), 1)[0])
