"""Settings that fit a budget: against hand arithmetic on a tracer of straight lines, and against real traces."""

from itertools import pairwise

import pytest

from grade.memory.decoding import quick_trace
from grade.memory.live import CATEGORIES
from grade.memory.plan import changed
from grade.memory.settings import ARITHMETIC, BANDWIDTH, LINK, about, gpu_seconds, settings
from grade.memory.step import StepConfig
from grade.memory.trace import Trace

STEP = StepConfig(model="tiny", prompt_tokens=4, max_new_tokens=10, batch_size=2, gumbel_topk=8)
ASKED = []


def straight(step, gpus, way):
    """Weights 1,000, of which fsdp2 divides 800 and adds 30; 100 (recomputed: 10) a sequence, and 1 for each token."""
    ASKED.append((step.batch_size, step.max_new_tokens, step.gradient_checkpointing, gpus, way))
    kept = 10 if step.gradient_checkpointing else 100
    weights = 1000 if way != "fsdp2" else 200 + 800 // gpus
    parts = dict.fromkeys(CATEGORIES, 0) | {
        "weights": weights, "activations": kept * step.batch_size + step.batch_size * step.max_new_tokens,
        "temporary": {"none": 0, "ddp": 20, "fsdp2": 30}[way],
    }  # fmt: skip
    low = dict.fromkeys(CATEGORIES, 0) | {"weights": weights}
    flops = int(1e12) * step.batch_size * (4 if step.gradient_checkpointing else 3)
    received = {"none": 0, "ddp": 400 * (gpus - 1) // gpus, "fsdp2": int(8e12) * (gpus - 1) // gpus}[way]
    peak = sum(parts.values())
    return Trace(peak, parts, {"rollout": low, "forward": parts}, "forward", [], [], 2, 2, flops, 0.0, received)


def found(room=2000, **values):
    ASKED.clear()
    return {(s.gpus, s.sharding, s.gradient_checkpointing): s for s in settings(STEP, room, straight, **values)}


def test_the_largest_batch_and_length_are_those_of_the_lines():
    rows = found()
    assert rows[1, "none", False].batch_size == 9  # 1000 + 110 B <= 2000
    assert rows[1, "none", True].batch_size == 50  # 1000 + 20 B
    assert rows[4, "ddp", False].batch_size == 8  # 1020 + 110 B
    assert rows[2, "fsdp2", False].batch_size == 12  # 630 + 110 B
    assert rows[4, "fsdp2", False].batch_size == 14  # 430 + 110 B
    assert rows[8, "fsdp2", True].batch_size == 83  # 330 + 20 B
    assert rows[1, "none", False].max_new_tokens == 400  # 1000 + 200 + 2 T
    assert rows[8, "fsdp2", False].max_new_tokens == 735
    assert rows[8, "ddp", True].received == 350 and rows[4, "fsdp2", True].received == 6e12
    assert {(gpus, way) for *_, gpus, way in ASKED} == {(1, "none"), (2, "ddp"), (2, "fsdp2")}


def test_the_cheapest_comes_first_and_is_traced():
    rows = list(found().values())
    assert all(a.gpu_seconds <= b.gpu_seconds for a, b in pairwise(rows))
    assert [row.traced for row in rows] == [True] + [False] * (len(rows) - 1)
    best = rows[0]
    assert (best.gpus, best.sharding, best.gradient_checkpointing, best.batch_size) == (1, "none", False, 9)
    assert best.gpu_seconds == pytest.approx(3e12 / ARITHMETIC + 10 * 1000 / BANDWIDTH / 9)
    assert (9, 10, False, 1, "none") in ASKED
    assert gpu_seconds(0, 0, 0, 900, 2) == 450 / LINK


def test_what_does_not_fit_comes_last():
    rows = list(found(room=1100).values())
    assert [(row.batch_size, row.max_new_tokens, row.gpu_seconds) for row in rows if row.batch_size is None] == [
        (None, None, None)
    ] * sum(row.batch_size is None for row in rows)
    assert rows[0].batch_size and rows[-1].batch_size is None
    (none,) = settings(changed(STEP, adapter="full", engine="checkpointed"), 900, straight, counts=(1,))
    assert (none.batch_size, none.peak, none.traced) == (None, 1110, False)
    full = settings(changed(STEP, adapter="full"), 2000, straight)
    assert {row.sharding for row in full} == {"none", "ddp"}


def test_a_guess_in_proportion_is_a_multiple_of_the_group():
    group = StepConfig(model="tiny", method="grpo", num_generations=4, batch_size=4, max_new_tokens=10)
    trace = straight(group, 1, "none")  # 440 for four: 1,000 bytes of room are nine
    assert [about(group, trace, room) for room in (2000, 1000, 10**9)] == [8, 4, 4096]


def test_the_lines_are_near_real_traces():
    """Of four GPUs, where two were traced."""

    def tracer(step, gpus, way):
        return quick_trace(step) if gpus == 1 else quick_trace(step, processes=gpus, sharding=way)

    step = changed(STEP, batch_size=8, max_new_tokens=4)
    rows = settings(step, 1_500_000, tracer, counts=(2, 4))
    (row,) = [r for r in rows if (r.gpus, r.sharding, r.gradient_checkpointing) == (4, "fsdp2", False)]
    real = tracer(changed(step, batch_size=row.batch_size), 4, "fsdp2")
    assert real.peak == pytest.approx(row.peak, rel=0.02) and real.received == pytest.approx(row.received, rel=0.01)
