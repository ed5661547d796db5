"""What a live tracker writes down of every storage: phase, module, use, sites of allocation, products and messages."""

import pytest
import torch
import torch.distributed as dist

from grade.memory.compat import alone_among
from grade.memory.records import LiveTracker


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
@pytest.mark.parametrize("processes", [2, 5])
def test_messages_count_what_reaches_one_process(processes):
    whole, part = torch.zeros(processes, 3), torch.zeros(3)
    with alone_among(processes), LiveTracker() as tracker:
        dist.broadcast(whole, 0)
        dist.barrier()
        assert tracker.received == 0
        dist.all_gather_into_tensor(whole, part)
        assert tracker.received == 12 * (processes - 1)  # all but its own part
        dist.all_reduce(part)
    assert tracker.received == 12 * (processes - 1) + 2 * (processes - 1) * 12 // processes
    assert isinstance(tracker.received, int)
