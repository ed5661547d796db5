"""Figures of the experiment on Intuitor, from its tables."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from grade.experiments.intuitor.measure.tables import Settings
from grade.experiments.measured import Tables, figures_of


def metrics(tables: Tables, settings: Settings) -> dict[str, float | str]:
    """Scores in nats, peaks in decimal GB, sequences that fit a GPU."""
    lengths, sweep = tables["lengths"], tables["sweep"]
    names = lengths.step.str.replace(", ", "_").str.replace(" ", "_").str.lower()
    return {
        **{f"intuitor/{name}": value for name, value in tables["certainty"].items()},
        **figures_of(tables["fits"], "intuitor/{setting}_fits_{logits}", {"": "fits"}),
        **figures_of(tables["fits"], "intuitor/{setting}_peak_gb_{logits}", {"": "peak_gb"}),
        **figures_of(lengths.assign(name=names), "intuitor/peak_gb_{tokens}_{name}", {"": "peak_gb"}),
        **{f"intuitor/sweep_{x}": sweep[x].iloc[-1] - sweep[x].iloc[0] for x in ("published", "document")},
        "intuitor/model": settings.model,
    }


def peaks_by_length(lengths: pd.DataFrame) -> Mapping[int, Mapping[str, float]]:
    """Peak in decimal GB by length and step."""
    return {n: dict(zip(rows.step, rows.peak_gb, strict=True)) for n, rows in lengths.groupby("tokens")}
