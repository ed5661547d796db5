"""What a tracker says of each storage: whose it is, when it lived and died, and how a trace sums them up."""

import pytest
import torch

from grade.memory.live import LiveTracker, StorageRecord
from grade.memory.models import model_config
from grade.memory.step import StepConfig
from grade.memory.trace import _assemble
from grade.memory.tracker import MemoryTracker, tensors_in


@pytest.mark.parametrize("tracker", [MemoryTracker, LiveTracker])
def test_nothing_was_counted_before_anything_was_made(tracker):
    with tracker() as tracked:
        pass
    assert (tracked.current, tracked.peak) == (0, 0)
    if tracker is LiveTracker:
        assert (tracked.flops, tracked.records, tracked.live) == (0, [], [])


def test_the_smallest_block_is_a_byte():
    with MemoryTracker(round_to=1) as tracked:
        kept = torch.zeros(3, dtype=torch.int8)
    assert (tracked.peak, len(kept)) == (3, 3)


def test_the_first_tag_stays_and_what_is_not_counted_is_skipped():
    x, other = torch.zeros(4), torch.zeros(4)
    tracker = LiveTracker(round_to=1)
    tracker.track_existing([x])
    tracker.tag([x, None, other], "weights")
    tracker.tag([x], "adapter")
    assert [record.tag for record in tracker.records] == ["weights"]
    assert tracker.category(tracker.records[0], vocab=2) == "weights"  # a tag goes before a shape


def test_storages_of_other_devices_are_not_counted():
    tracker = LiveTracker(round_to=1, device="meta")
    with tracker:
        here, there = torch.zeros(4), torch.zeros(8, device="meta")
    assert [record.shape for record in tracker.records] == [(8,)]
    assert (tracker.current, here.numel(), there.numel()) == (32, 4, 8)


def test_a_storage_is_the_innermost_modules():
    inner = torch.nn.Linear(4, 4)
    tracker = LiveTracker(round_to=1)
    with tracker, tracker.naming(torch.nn.Sequential(torch.nn.Sequential(inner))) as _:
        outside = torch.zeros(2)
        out = torch.nn.Sequential(inner)(outside.expand(3, 2).repeat(1, 2))
    assert {record.module for record in tracker.records if record.op == "addmm"} == {"0.0"}
    assert {record.module for record in tracker.records if record.op == "zeros"} <= {""}
    assert out.shape == (3, 4)


def test_who_is_alive_after_an_allocation():
    tracker = LiveTracker()
    tracker.records = [StorageRecord(512, (1,), torch.float32, "op", "", "forward", birth) for birth in range(3)]
    tracker.records[0].death = 2  # right after the allocation of number 1
    alive = [[record.birth for record in tracker.alive_at(index)] for index in range(3)]
    assert alive == [[0], [0, 1], [1, 2]]


def test_death_is_noted_with_its_phase():
    tracker = LiveTracker(round_to=1)
    with tracker:
        with tracker.during("rollout"):
            x = torch.zeros(4)
        with tracker.during("loss"):
            del x
            y = torch.zeros(5)
    dead = tracker.records[0]
    assert (dead.phase, dead.death, dead.end_phase) == ("rollout", 1, "loss") and y.numel() == 5
    assert tracker.category(dead, vocab=100) == "rollout"  # not saved, and it outlived its phase


def test_tensors_are_found_in_lists_tuples_and_keywords():
    x, y, z = (torch.zeros(n) for n in (1, 2, 3))
    assert [t.numel() for t in tensors_in([x, [y, (z, 3)], None])] == [1, 2, 3]
    old = torch.zeros(4)
    with MemoryTracker(round_to=1) as tracker:
        torch.add(torch.ones(4), torch.ones(4), out=old)  # seen as a keyword: older than the tracker
    assert (tracker.current, old.tolist()) == (0, [2.0] * 4)


def test_a_storage_that_grows_counts_what_it_grew_by():
    with MemoryTracker(round_to=1) as tracker:
        x = torch.zeros(10)
        x.resize_(25)
        assert (tracker.current, tracker.peak) == (100, 100)


def test_peaks_are_extrapolated_by_a_straight_line():
    trackers = []
    for layers in (2, 3):
        tracker = LiveTracker(round_to=1)
        with tracker, tracker.during("backward"):
            kept = torch.zeros(1000 + 100 * layers, 1)
        # The line needs one site in both traces: allocations are told apart by their shapes.
        (site,) = tracker.sites.values()
        tracker.sites = {("backward", "zeros", "", ()): site}
        trackers.append((tracker, kept))
    found = _assemble([tracker for tracker, _ in trackers], [2, 3], 10, vocab=10**9, seconds=1.5)
    assert found.peak == 4 * (1000 + 100 * 10)
    assert (found.layers, found.traced_layers, found.peak_phase, found.seconds) == (10, 3, "backward", 1.5)
    assert sum(found.categories.values()) == found.peak
    assert [part.nbytes for part in found.largest] == [5200]  # of the deepest trace, as it was
    alone = _assemble([trackers[1][0]], [3], 3, vocab=10**9, seconds=0.0)
    assert alone.peak == 4 * 1300 and [part.nbytes for part in alone.largest] == [5200]


@pytest.mark.parametrize("tokens", [1, 2])
def test_one_prompt_is_padded_where_there_is_room(tokens):
    config = StepConfig(model="tiny", batch_size=2, prompt_tokens=tokens, max_new_tokens=2, dtype="float32")
    backbone, _ = config.build(model_config("tiny"), "cpu")
    assert config.prompts(backbone).mask.tolist() == [[0, 1][-tokens:], [1] * tokens]  # on the left


@pytest.mark.parametrize("method", ["ste", "ppo"])
def test_copies_of_the_base_are_without_adapter_and_value_head(method):
    config = StepConfig(
        model="tiny", method=method, base_copies=3, batch_size=1, prompt_tokens=3, max_new_tokens=2, dtype="float32",
        gumbel_topk=4 if method == "ste" else 256,
    )  # fmt: skip
    backbone, others = config.build(model_config("tiny"), "cpu")
    base = [p.shape for name, p in backbone.model.named_parameters() if "lora_" not in name]
    copies = config.make_step(backbone, others).copies
    assert [p.shape for p in copies] == [*base, *base]
