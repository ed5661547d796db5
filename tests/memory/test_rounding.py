"""Storages are counted in blocks of 512 bytes, as CUDA's allocator hands them out, by every tracker's default."""

import pytest
import torch

from grade.memory.live import LiveTracker
from grade.memory.trace import run_tracked
from grade.memory.tracker import MemoryTracker

BLOCKS = [(0, 0), (1, 512), (128, 512), (129, 1024), (257, 1536)]
"""Elements of 4 bytes, and the bytes that they take."""


class Allocation:
    """A step that allocates one tensor, beside one that is there already."""

    backbone = torch.nn.Identity()

    def __init__(self, elements):
        self.elements, self.before = elements, torch.zeros(3)

    def existing(self):
        return {"weights": [self.before]}

    def run(self, tracker=None):
        self.made = torch.zeros(self.elements)


@pytest.mark.parametrize(("elements", "expected"), BLOCKS)
@pytest.mark.parametrize("tracker", [MemoryTracker, LiveTracker])
def test_a_storage_takes_whole_blocks(tracker, elements, expected):
    with tracker() as tracked:
        kept = torch.zeros(elements)
    assert tracked.peak == expected, kept.shape


@pytest.mark.parametrize(("elements", "expected"), BLOCKS)
def test_a_tracked_step_counts_blocks_too(elements, expected):
    tracker = run_tracked(Allocation(elements))
    assert [record.nbytes for record in tracker.records if record.op == "existing"] == [512]
    assert sum(record.nbytes for record in tracker.records if record.op != "existing") == expected
    assert tracker.peak == 512 + expected
