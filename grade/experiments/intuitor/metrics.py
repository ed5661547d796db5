"""Figures of the experiment on Intuitor, from its tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from grade.experiments.measured import Tables

if TYPE_CHECKING:
    from grade.experiments.intuitor.measure.tables import Settings


def metrics(tables: Tables, settings: Settings) -> dict[str, float | str]:
    """Every figure of the experiment.

    Names to values: scores in nats, peaks in decimal GB, sequences that fit a GPU.
    """
    fits, lengths, sweep = tables["fits"], tables["lengths"], tables["sweep"]
    figures = {f"intuitor/{name}": value for name, value in tables["certainty"].items()}
    for row in fits.itertuples():
        figures[f"intuitor/{row.setting}_fits_{row.logits}"] = row.fits
        figures[f"intuitor/{row.setting}_peak_gb_{row.logits}"] = row.peak_gb
    for row in lengths.itertuples():
        step = row.step.replace(", ", "_").replace(" ", "_").lower()
        figures[f"intuitor/peak_gb_{row.tokens}_{step}"] = row.peak_gb
    for name in ("published", "document"):
        figures[f"intuitor/sweep_{name}"] = sweep[name].iloc[-1] - sweep[name].iloc[0]
    return figures | {"intuitor/model": settings.model}


def peaks_by_length(lengths: pd.DataFrame) -> Mapping[int, Mapping[str, float]]:
    """Peak in decimal GB by length and step."""
    return {n: dict(zip(rows.step, rows.peak_gb, strict=True)) for n, rows in lengths.groupby("tokens")}
