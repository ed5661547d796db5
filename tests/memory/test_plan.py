"""The largest batch that fits a budget, and single changes: on sums by hand, and on real traces."""

import pytest

from grade.memory.plan import largest_batch, single_changes
from grade.memory.records import CATEGORIES
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace, trace

SMALL = dict(model="tiny", prompt_tokens=4, max_new_tokens=6)
GROUP = StepConfig(**SMALL, method="grpo", num_generations=4)


def by_hand(weights, **parts):
    """A trace with two phases."""
    high = dict.fromkeys(CATEGORIES, 0) | {"weights": weights} | parts
    low = dict.fromkeys(CATEGORIES, 0) | {"weights": weights}
    return Trace({"rollout": low, "forward": high}, [], [], 2, 2, 0, 0.0)


def line(step):
    """1,000 bytes of weights and 10 for each token of each sequence."""
    return by_hand(1000, temporary=10 * step.batch_size * step.max_new_tokens)


def bent(step):
    """The same, and more for each sequence beyond 100; the line through any two points misses it."""
    return by_hand(1000, temporary=step.batch_size + 50 * max(step.batch_size - 100, 0) ** 2)


@pytest.mark.parametrize("own", [1, 7, 300])
@pytest.mark.parametrize("budget", [1059, 1060, 1234, 5000, 10**6])
def test_the_largest_batch_is_found_from_any_start(budget, own):
    fit = largest_batch(StepConfig(**SMALL, batch_size=own), budget + 7, 7, line)
    most = min((budget - 1000) // 60, 4096)
    assert (fit.batch_size, fit.peak) == (most or None, 1000 + 60 * (most or 1))


def test_a_peak_that_is_no_straight_line_takes_a_few_traces_more():
    asked = []
    fit = largest_batch(StepConfig(**SMALL), 20_000, tracer=lambda step: asked.append(step) or bent(step))
    assert bent(StepConfig(**SMALL, batch_size=fit.batch_size)).peak <= 20_000
    assert bent(StepConfig(**SMALL, batch_size=fit.batch_size + 1)).peak > 20_000 and len(asked) < 36


@pytest.mark.parametrize(("budget", "batch"), [(1200, None), (1239, None), (1240, 4), (1719, 8), (1720, 12)])
def test_a_batch_that_fits_is_made_of_whole_groups(budget, batch):
    fit = largest_batch(GROUP, budget, tracer=line)
    assert (fit.batch_size, fit.peak) == (batch, 1000 + 60 * (batch or 4))
    assert largest_batch(GROUP, 10**9, tracer=line, most=11).batch_size == 8


def test_what_fits_is_what_a_trace_says():
    config = StepConfig(**SMALL, gumbel_topk=8)
    fit = largest_batch(config, 1_000_000)
    assert fit.peak == trace(config.changed(batch_size=fit.batch_size)).peak <= 1_000_000
    assert trace(config.changed(batch_size=fit.batch_size + 1)).peak > 1_000_000


def test_single_changes_are_those_that_the_method_has():
    config = StepConfig(**SMALL, method="grpo", reward="trunk", batch_size=16)
    asked = []
    found = single_changes(config, trace(config), lambda step: asked.append(step) or trace(step))
    assert {change.name for change in found} >= {"half the batch", "gradient checkpointing"}
    assert all(step.method == "grpo" and step.engine_name is None for step in asked)
    names = {change.name for change in single_changes(config.changed(batch_size=8), trace(config), line)}
    assert "half the batch" not in names  # of one group
    relaxed = StepConfig(**SMALL, gumbel_topk=8)
    assert "half the batch" in {c.name for c in single_changes(relaxed.changed(batch_size=2), by_hand(9999), line)}
