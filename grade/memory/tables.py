"""Traces as tables: bytes at the peak by category, live bytes over a step."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from grade.memory.live import CATEGORIES
from grade.memory.trace import Trace


def categories_table(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """Bytes at the peak by category.

    Args:
        traces: Traces by the name of their configuration.

    Returns:
        Columns configuration, category, bytes: a row for each pair, in the order of the traces and of `CATEGORIES`.
    """
    rows = [(name, category, trace.categories[category]) for name, trace in traces.items() for category in CATEGORIES]
    return pd.DataFrame(rows, columns=["configuration", "category", "bytes"])


def timelines_table(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """Live bytes after each allocation of a step.

    Args:
        traces: Traces of all layers by the name of their configuration: of an extrapolated trace the timeline holds
            the traced layers only, and would show less than its peak.

    Returns:
        Columns configuration, phase, bytes, one row for each allocation in order; where a step has more than
        `MOST_POINTS`, the largest of each run of neighbours of one phase.

    Raises:
        ValueError: If a trace is extrapolated.
    """
    tables = []
    for name, trace in traces.items():
        if trace.traced_layers < trace.layers:
            raise ValueError(f"the trace of {name!r} is extrapolated from {trace.traced_layers} layers")
        table = pd.DataFrame(trace.timeline, columns=["phase", "bytes"])
        run = (table.phase != table.phase.shift()).cumsum() * len(table)  # runs of one phase are kept apart
        size = -(-len(table) // MOST_POINTS)
        place = table.groupby(run).cumcount() // size
        thin = table.groupby([run, place], sort=False, as_index=False).agg({"phase": "first", "bytes": "max"})
        tables.append(thin.assign(configuration=name)[["configuration", "phase", "bytes"]])
    return pd.concat(tables, ignore_index=True)


MOST_POINTS = 1000
"""Points of a timeline: as many as a figure of its width can show."""
