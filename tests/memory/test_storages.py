"""What a tracker does with storages at the edges: empty, older than it, of sparse tensors, freed late."""

import pytest
import torch

from grade.memory.live import LiveTracker
from grade.memory.tracker import MemoryTracker, Phase, storage_of, tensors_in

TRACKERS = pytest.mark.parametrize("tracker", [MemoryTracker, LiveTracker])


@TRACKERS
def test_what_is_older_costs_nothing_and_gives_nothing_back(tracker):
    old, empty = torch.zeros(5, dtype=torch.int8), torch.zeros(0)
    with tracker(round_to=1) as tracked:
        kept = torch.zeros(3, dtype=torch.int8)
        old.view(1, 5), empty.view(0, 1)
        old.add_(1)
        assert tracked.current == tracked.peak == 3
        del old, empty
        assert tracked.current == 3
        new = torch.zeros(0)
        del new
    assert (tracked.current, tracked.peak, len(kept)) == (3, 3, 3)


@TRACKERS
def test_a_storage_that_was_empty_counts_when_it_grows(tracker):
    with tracker(round_to=1) as tracked:
        x = torch.zeros(0)
        assert tracked.current == 0
        x.resize_(10)
        assert tracked.current == 40
        x.resize_(7)  # a smaller view of the same storage
        assert tracked.current == tracked.peak == 40
    del x
    assert tracked.current == 0


@TRACKERS
def test_older_storages_that_grow_are_still_older(tracker):
    old = torch.zeros(2)
    with tracker(round_to=1) as tracked:
        old.add_(1)
        old.resize_(100)
    assert (tracked.current, tracked.peak) == (0, 0)


@TRACKERS
@pytest.mark.parametrize(("round_to", "expected"), [(1, 12), (5, 15), (12, 12), (13, 13), (24, 24)])
def test_a_storage_is_rounded_up_to_a_multiple(tracker, round_to, expected):
    older = torch.zeros(3)
    with tracker(round_to) as tracked:
        kept = torch.zeros(3)
    assert (tracked.current, kept.nbytes) == (expected, 12)
    tracked.track_existing([older])
    assert tracked.current == 2 * expected
    if tracker is LiveTracker:
        assert [record.nbytes for record in tracked.records] == [expected] * 2


@pytest.mark.parametrize("tracker", [MemoryTracker, LiveTracker])
@pytest.mark.parametrize("round_to", [0, -1, -512])
def test_blocks_of_no_bytes_are_refused(tracker, round_to):
    with pytest.raises(ValueError, match=f"at least 1, not {round_to}"):
        tracker(round_to)


@TRACKERS
def test_sparse_tensors_have_no_storage_of_their_own(tracker):
    sparse = torch.eye(3).to_sparse()
    assert storage_of(sparse) is None and storage_of(torch.eye(3)).nbytes() == 36
    tracked = tracker(round_to=1)
    tracked.track_existing([sparse])
    with tracked:
        product = torch.sparse.mm(sparse, torch.eye(3))
        tracked.track_existing([sparse])
    assert product.tolist() == torch.eye(3).tolist()
    assert tracked.current == 36  # the product's; the identity that was made for it is gone
    if tracker is LiveTracker:
        tracked.tag([sparse, None], "weights")
        tracked.resized(sparse, "gathered")
        assert {record.tag for record in tracked.records} == {None}


@TRACKERS
def test_what_existed_is_counted_once_however_often_it_is_named(tracker):
    x, y = torch.zeros(4), torch.zeros(6)
    tracked = tracker(round_to=1)
    tracked.track_existing([x, x.view(2, 2)])
    tracked.track_existing(iter([y]))
    assert (tracked.current, tracked.peak) == (40, 40)
    with tracked:
        x.mul_(2)
        tracked.track_existing([x, y])
    assert (tracked.current, tracked.peak) == (40, 40)
    del x
    assert (tracked.current, tracked.peak) == (24, 40)


def test_an_older_storage_that_is_named_late_dies_once():
    old = torch.zeros(4)
    with MemoryTracker(round_to=1) as tracked:
        kept = torch.zeros(1)
        old.add_(1)  # seen: remembered as older
        tracked.track_existing([old])
        assert tracked.current == 20
        del old
        assert tracked.current == kept.nbytes == 4


@pytest.mark.parametrize(
    "make", [lambda: torch.tensor([1.0, 2.0]), lambda: torch.as_tensor([1.0, 2.0]), lambda: torch.tensor(2.0).repeat(2)]
)
def test_tensors_from_python_data_count_by_what_is_left(make):
    with MemoryTracker(round_to=1) as tracked:
        kept = make()
    assert tracked.current == kept.nbytes == 8


def test_a_phase_that_comes_again_starts_with_what_is_alive():
    with MemoryTracker(round_to=1) as tracked:
        tracked.mark("a")
        tracked.mark("b")
        x = torch.zeros(100)
        assert tracked.phases == {"a": Phase(0, 0), "b": Phase(400, 400)}
        tracked.mark("a")
        assert tracked.phases["a"] == Phase(peak=400, current=400)
        del x
        assert tracked.phases["a"] == Phase(peak=400, current=0)
        copies = tracked.phases
        copies["a"].peak = 7
        assert tracked.phases["a"].peak == 400
    assert list(tracked.phases) == ["a", "b"]


def test_the_peak_of_a_phase_outlives_a_reset():
    with MemoryTracker(round_to=1) as tracked:
        tracked.mark("a")
        x = torch.zeros(100)
        y = torch.zeros(50)
        del x
        tracked.reset_peak()
        assert tracked.peak == tracked.current == y.nbytes == 200
        assert tracked.phases["a"] == Phase(peak=600, current=200)


def test_a_finished_tracker_is_not_kept_by_what_it_counted():
    import weakref

    with MemoryTracker(round_to=1) as tracked:
        kept = torch.zeros(4)
    alive = weakref.ref(tracked)
    del tracked
    assert alive() is None and len(kept) == 4


@TRACKERS
def test_torch_does_not_wrap_a_tracker_against_compilation(tracker):
    """A wrapped hook is called through torch's ``disable``, which takes a tenth of a trace."""

    class Own(tracker):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return super().__torch_dispatch__(func, types, args, kwargs)

    assert not hasattr(Own.__torch_dispatch__, "__wrapped__")
    assert not hasattr(tracker.__torch_dispatch__, "__wrapped__")
    with Own(round_to=1) as tracked:
        kept = torch.zeros(2)
    assert tracked.current == kept.nbytes


def test_values_that_hold_no_tensor_are_passed_over():
    assert list(tensors_in([1, "x", None, {"a": torch.zeros(1)}, (), [[]]])) == []
    x = torch.zeros(1)
    assert [id(t) for t in tensors_in((x, [x, (x,)]))] == [id(x)] * 3
