"""The model of CUDA's caching allocator: sequences worked by hand, and whole steps."""

import pytest
import torch

from grade.memory.allocator import (
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    WORKSPACE,
    CachingAllocator,
    Reserved,
    allocate_step,
    reserved_by,
)
from grade.memory.models import model_config
from grade.memory.records import StorageRecord
from grade.memory.settings import StepConfig
from grade.memory.trace import trace_layers

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from 10 MiB on, the size itself in steps of 2 MiB
        (25 * MIB, 26 * MIB),
    ],
)
def test_a_segment_is_as_large_as_the_size_asks_for(asked, segment):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == segment


def test_a_small_block_is_split_down_to_512_bytes():
    allocator = CachingAllocator()
    first = allocator.allocate(MIB)
    second = allocator.allocate(MIB - 512)  # 1 MiB is left of the segment: 512 bytes remain and are a block
    third = allocator.allocate(512)
    assert (first.address, second.address, third.address) == (0, MIB, 2 * MIB - 512)
    assert (allocator.reserved, allocator.allocated) == (SMALL_SEGMENT, SMALL_SEGMENT)
    allocator.allocate(1)
    assert allocator.reserved == 2 * SMALL_SEGMENT


def test_a_large_block_is_split_only_if_more_than_1_mib_remains():
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB))
    whole = allocator.allocate(11 * MIB)  # 1 MiB would remain, which is not more than 1 MiB
    assert (whole.size, allocator.allocated, allocator.reserved) == (12 * MIB, 12 * MIB, 12 * MIB)
    allocator.free(whole)
    part = allocator.allocate(11 * MIB - 512)
    assert (part.size, part.after.size, part.after.used) == (11 * MIB - 512, MIB + 512, False)


def test_neighbours_that_are_free_merge():
    allocator = CachingAllocator()
    first, second, third, fourth = (allocator.allocate(5 * MIB) for _ in range(4))
    assert allocator.reserved == LARGE_SEGMENT  # four of 5 MiB fill one of 20 MiB
    allocator.free(first)
    allocator.free(third)
    assert allocator.allocate(5 * MIB).address == 0  # two free ones of 5 MiB apart: the one at the lower address
    allocator.free(second)  # second and third are one of 10 MiB now
    assert allocator.allocate(10 * MIB).address == 5 * MIB
    assert allocator.reserved == LARGE_SEGMENT
    allocator.free(fourth)
    assert allocator.allocated == 15 * MIB


def test_the_smallest_block_that_is_large_enough_is_reused():
    allocator = CachingAllocator()
    large, between, medium = allocator.allocate(16 * MIB), allocator.allocate(12 * MIB), allocator.allocate(14 * MIB)
    allocator.free(large)
    allocator.free(medium)
    assert between.address == 16 * MIB
    assert allocator.allocate(13 * MIB).address == 28 * MIB  # of 16 and 14 MiB the one of 14
    assert allocator.reserved == 42 * MIB


def record(nbytes, birth, death=None, op="mm"):
    return StorageRecord(nbytes, (), torch.float32, op, "", "forward", birth, death=death)


def test_a_step_by_hand():
    """Weights of 3 MiB stay, in a segment of 20 MiB of which 17 MiB are left.

    18 MiB do not fit there: a segment of 18. They are freed before 22 MiB are made: one of 22. The second step finds
    both free and needs no more.
    """
    step = [record(3 * MIB, 0, op="existing"), record(18 * MIB, 1, 2), record(22 * MIB, 2, 3), record(0, 3, 3)]
    assert allocate_step(step) == Reserved(live=25 * MIB, allocated=25 * MIB, reserved=60 * MIB)
    assert allocate_step(step).fragmentation == pytest.approx(1 - 25 / 60)
    assert allocate_step(step, workspace=2 * MIB) == Reserved(27 * MIB, 27 * MIB, 60 * MIB)  # beside the weights


def test_a_step_on_what_the_one_before_it_left_by_hand():
    """At first 5 and 15 MiB share a segment of 20, beside one of 16.

    Then 5 MiB are taken from that of 16, 16 from that of 20, and for 15 there is a third, of 16, with all that it has.
    """
    step = [record(nbytes * MIB, birth) for birth, nbytes in enumerate((5, 16, 15))]
    assert allocate_step(step) == Reserved(live=36 * MIB, allocated=37 * MIB, reserved=52 * MIB)


@pytest.mark.parametrize("values", [dict(method="grpo", num_generations=2), dict(gradient_checkpointing=True)])
def test_a_step_s_live_peak_is_the_tracker_s_and_few_passes_change_little(values):
    config = StepConfig(model="tiny", batch_size=4, prompt_tokens=6, max_new_tokens=24, **values)
    tracker = trace_layers(config, model_config("tiny"), "cuda")
    whole, few = allocate_step(tracker.records, workspace=WORKSPACE), reserved_by(config)
    assert whole.live == few.live == tracker.peak + WORKSPACE
    assert whole.live <= whole.allocated <= whole.reserved
    # A segment more or less: which blocks the passes between would have taken is not known.
    assert abs(whole.reserved - few.reserved) <= SMALL_SEGMENT
