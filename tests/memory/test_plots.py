"""Tables of traces by hand, and bars that are what the tables say."""

import matplotlib.pyplot as plt
import pytest

from grade.memory.plots import categories_figure
from grade.memory.records import CATEGORIES
from grade.memory.settings import StepConfig
from grade.memory.tables import MOST_POINTS, categories_table, timelines_table
from grade.memory.trace import Trace, trace

GIB = 2**30


def made(timeline=(), layers=2, **peak):
    """A trace with one phase, whose peak holds so many bytes of each category."""
    return Trace({"forward": dict.fromkeys(CATEGORIES, 0) | peak}, [], list(timeline), layers, 2, flops=0, seconds=0.0)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_a_timeline_of_all_layers_reaches_the_peak():
    whole = trace(StepConfig(model="tiny", prompt_tokens=4, max_new_tokens=2, gumbel_topk=8), all_layers=True)
    assert timelines_table({"tiny": whole})["bytes"].max() == whole.peak


def test_a_long_timeline_keeps_the_largest_of_neighbours_of_one_phase():
    # Of 2 * MOST_POINTS + 1 allocations every three neighbours become one; the single one of backward stays apart.
    steps = [("forward", i) for i in range(2 * MOST_POINTS)] + [("backward", 1)]
    table = timelines_table({"long": made(steps)})
    assert table.bytes[:3].tolist() == [2, 5, 8]
    assert table.bytes.max() == 2 * MOST_POINTS - 1
    assert table.iloc[-1].tolist() == ["long", "backward", 1]
    assert len(table) <= MOST_POINTS


def test_bars_are_the_bytes_of_the_categories_in_order():
    table = categories_table({"large": made(weights=3 * GIB, logits=GIB), "first": made(weights=GIB)})
    assert table.category.tolist() == [*CATEGORIES, *CATEGORIES]
    (ax,) = categories_figure(table, "", {"large": "the large one"}, budget=2 * GIB).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["the large one", "first"]
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in ax.containers}
    assert widths["weights"] == [3, 1] and widths["logits"] == [1, 0]
    assert all(name.startswith("_") for name in widths.keys() - {"weights", "logits"})  # too small for the legend
    assert [text.get_text() for text in ax.texts] == ["4.00", "1.00", "2 GiB "]
