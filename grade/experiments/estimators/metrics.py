"""Figures of the study, from its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd

from grade.experiments.estimators.measure.enumerated import worst_bias
from grade.experiments.estimators.measure.rows import POLICY_GRADIENTS
from grade.experiments.measured import Tables

if TYPE_CHECKING:
    from grade.experiments.estimators.measure.tables import Settings

Values = dict[str, float | int | None]

_QUALITY = ("along", "along_stderr", "bias2", "bias2_stderr", "variance", "mse", "snr")
_ENDS = ("", "_low", "_high")


def metrics(tables: Tables, settings: Settings) -> Values:
    """Every figure that is the same in every run; a number or an interval that does not exist is None.

    Names that begin with ``after/`` are of the policy after training.

    Names to values: bias and mse of the enumerated policy (squared errors over the squared norm of the gradient);
    worth and crossover of the chosen estimator in samples, with ends of their 95 % intervals; hybrid, the gain of
    the blend; snr, cosine_64 and worth of every estimator; spread.
    """
    found: Values = {}
    if settings.enumerated:
        found |= _enumerated(tables, settings)
    for policy, table in _by_policy(tables["worth"]):
        found |= {_prefix(policy) + key: value for key, value in _worth(table, settings.chosen.name).items()}
    for row in tables["hybrid"].itertuples():
        key = f"{_prefix(row.policy)}hybrid/{row.reward}/{row.n}"
        found |= {key: row.ratio, f"{key}_low": row.low, f"{key}_high": row.high, f"{key}_share": row.share}
    for row in tables["spread"].itertuples():
        for name in ("tensor_spread", "sd", "relative"):
            found[f"{_prefix(row.policy)}spread/{row.reward}/{row.estimator}/{name}"] = getattr(row, name)
    return {key: _finite(value) for key, value in found.items()}


def timed_metrics(tables: Tables, settings: Settings) -> Values:
    """Figures of seconds: milliseconds of a sample, and worth per second of the chosen estimator."""
    found: Values = {}
    for row in tables["speed"].itertuples():
        prefix = _prefix(row.policy)
        found[f"{prefix}estimators/{row.reward}/{row.estimator}/milliseconds"] = row.milliseconds
        if row.estimator == settings.chosen.name:
            found[f"{prefix}worth_per_second/{row.reward}"] = row.worth_per_second
    return {key: _finite(value) for key, value in found.items()}


def _enumerated(tables: Tables, settings: Settings) -> Values:
    quality, found = tables["quality"], {}
    for row in tables["mse_ratio"].itertuples():
        short = (row.draws, row.reward) == (max(settings.tiny_draws), "bag")
        key = "mse/gumbel_rao_over_ste" + ("" if short else f"_{row.reward}_m{row.draws}")
        found |= {key + end: getattr(row, name) for end, name in zip(_ENDS, ("ratio", "low", "high"), strict=True)}
    for row in quality.itertuples():
        found |= {f"bias/{row.estimator}/{row.reward}/{name}": getattr(row, name) for name in _QUALITY}
    return found | {
        "bias/samples": int(quality.n.iloc[0]),
        "bias/unbiased_worst_in_stderr": worst_bias(quality, POLICY_GRADIENTS),
    }


def _worth(table: pd.DataFrame, chosen: str) -> Values:
    found: Values = {"worth/samples": int(table.n.iloc[0])}
    for row in table.itertuples():
        if row.estimator == chosen:
            found |= {f"{name}/{row.reward}{end}": getattr(row, name + end)
                      for name in ("worth", "crossover") for end in _ENDS}  # fmt: skip
        found |= {f"estimators/{row.reward}/{row.estimator}/{name}": getattr(row, name)
                  for name in ("snr", "cosine_64", "worth")}  # fmt: skip
    return found


def _by_policy(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    yield from ((str(policy), rows) for policy, rows in table.groupby("policy", sort=False))


def _prefix(policy: str) -> str:
    return "" if policy == "before" else f"{policy}/"


def _finite(value: Any) -> float | int | None:
    """None for what does not exist: None itself, or NaN or an infinity (a blank or ``inf`` in a written table)."""
    return value if value is not None and math.isfinite(value) else None
