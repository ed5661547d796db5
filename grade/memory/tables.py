"""Traces as tables: what the peak holds, and how a step gets there."""

from collections.abc import Mapping

import pandas as pd

from grade.memory.records import CATEGORIES
from grade.memory.trace import Trace

MOST_POINTS = 1000
"""Points of a timeline: as many as a figure of its width can show."""


def categories_table(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """Bytes at the peak: columns configuration, category, bytes, in the order of the traces and of `CATEGORIES`."""
    rows = [(name, category, trace.categories[category]) for name, trace in traces.items() for category in CATEGORIES]
    return pd.DataFrame(rows, columns=["configuration", "category", "bytes"])


def timelines_table(traces: Mapping[str, Trace]) -> pd.DataFrame:
    """Live bytes after each allocation: columns configuration, phase, bytes.

    Where a step has more allocations than `MOST_POINTS`, the largest of each run of neighbours of one phase. All layers
    must have been traced (`grade.memory.trace.trace` with ``all_layers``): an extrapolated timeline would show less
    than its peak, and is a `ValueError`.
    """
    tables = []
    for name, traced in traces.items():
        if traced.traced_layers < traced.layers:
            raise ValueError(f"the trace of {name!r} is extrapolated from {traced.traced_layers} layers")
        table = pd.DataFrame(traced.timeline, columns=["phase", "bytes"])
        run = (table.phase != table.phase.shift()).cumsum() * len(table)  # runs of one phase are kept apart
        place = table.groupby(run).cumcount() // -(-len(table) // MOST_POINTS)
        thin = table.groupby([run, place], sort=False, as_index=False).agg({"phase": "first", "bytes": "max"})
        tables.append(thin.assign(configuration=name)[["configuration", "phase", "bytes"]])
    return pd.concat(tables, ignore_index=True)
