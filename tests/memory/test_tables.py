"""Traces as tables: sums, order, and what is thinned out."""

import pytest

from grade.memory import tables
from grade.memory.live import CATEGORIES
from grade.memory.step import StepConfig
from grade.memory.tables import categories_table, timelines_table
from grade.memory.trace import Trace, trace


def hand_trace(timeline=(), layers=2, traced_layers=2, **parts):
    categories = dict.fromkeys(CATEGORIES, 0) | parts
    return Trace(sum(parts.values()), categories, {}, "forward", [], list(timeline), layers, traced_layers, 0, 0.0)


def test_categories_are_rows_in_the_order_of_traces_and_categories():
    table = categories_table({"b": hand_trace(weights=3, logits=1), "a": hand_trace(weights=2)})
    assert table.configuration.tolist() == ["b"] * len(CATEGORIES) + ["a"] * len(CATEGORIES)
    assert table.category.tolist() == 2 * list(CATEGORIES)
    assert table.groupby("configuration")["bytes"].sum().to_dict() == {"b": 4, "a": 2}


def test_a_short_timeline_is_kept_whole():
    timeline = [("forward", 1), ("forward", 3), ("backward", 2), ("forward", 1)]
    table = timelines_table({"x": hand_trace(timeline)})
    assert list(table.columns) == ["configuration", "phase", "bytes"]
    assert list(zip(table.phase, table["bytes"], strict=True)) == timeline


def test_a_long_timeline_keeps_its_peaks_and_its_phases(monkeypatch):
    monkeypatch.setattr(tables, "MOST_POINTS", 3)
    timeline = [("forward", n) for n in (1, 5, 2, 3)] + [("backward", 9)] + [("forward", n) for n in (4, 0)]
    table = timelines_table({"x": hand_trace(timeline)})  # runs of at most 3 of one phase
    assert list(zip(table.phase, table["bytes"], strict=True)) == [
        ("forward", 5), ("forward", 3), ("backward", 9), ("forward", 4),
    ]  # fmt: skip


def test_the_timeline_of_an_extrapolated_trace_is_refused():
    with pytest.raises(ValueError, match="'deep' is extrapolated from 3"):
        timelines_table({"deep": hand_trace([("forward", 1)], layers=5, traced_layers=3)})


def test_a_timeline_of_all_layers_reaches_the_peak():
    whole = trace(StepConfig(model="tiny", prompt_tokens=4, max_new_tokens=2, gumbel_topk=8), all_layers=True)
    assert timelines_table({"tiny": whole})["bytes"].max() == whole.peak
