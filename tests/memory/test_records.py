"""What a live tracker writes down of every storage: phase, module, use, sites of allocation, products and messages."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from grade.memory.compat import alone_among
from grade.memory.records import LiveTracker, StorageRecord


def record(**values):
    fields = dict(nbytes=4, shape=(1,), dtype=torch.float32, op="op", module="", phase="forward", birth=0)
    return StorageRecord(**fields | values)








@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_type_of_device_is_counted_or_all(device):
    trackers = LiveTracker(1, device), LiveTracker(1)
    kept = []
    for tracker in trackers:
        with tracker:
            kept += [torch.zeros(2), torch.zeros(5, device="meta")]
    assert [tracker.current for tracker in trackers] == [{"cpu": 8, "meta": 20}[device], 28]
    assert [len(tracker.records) for tracker in trackers] == [1, 2]


def test_of_nested_phases_the_outermost_counts_and_an_error_ends_one():
    tracker = LiveTracker()
    with tracker.during("a"), tracker.during("b"), tracker.during("c"):
        assert tracker.phase == "a"
    with pytest.raises(KeyError), tracker.during("a"):
        raise KeyError
    assert tracker.phase == "forward"


def test_within_autograd_the_phase_is_backward_whatever_runs():
    w, tracker = torch.ones(3, requires_grad=True), LiveTracker(round_to=1)
    with tracker, tracker.during("loss"):
        loss = (w * 2).sum()
        loss.backward()
        after = torch.zeros(7)
    (gradient,) = [r for r in tracker.records if r.shape == (3,) and r.death is None]
    assert gradient.phase == "backward" and w.grad.tolist() == [2, 2, 2]
    assert tracker.phase_of[0] == tracker.phase_of[-1] == "loss" and len(after) == 7
    assert {r.phase for r in tracker.records} == {"loss", "backward"}


def test_allocations_are_numbered_with_live_bytes_and_phase():
    tracker = LiveTracker(round_to=1)
    old = torch.zeros(1)
    tracker.track_existing([old])
    with tracker:
        a = torch.ones(2)
        with tracker.during("rollout"):
            b = torch.zeros(3, dtype=torch.int64)
            del a
            c = b + 1
    assert tracker.live == [4, 12, 36, 52] and tracker.phase_of == ["forward", "forward", "rollout", "rollout"]
    assert [r.birth for r in tracker.records] == [0, 1, 2, 3]
    assert [r.op for r in tracker.records] == ["existing", "ones", "zeros", "add"]
    assert [(r.shape, r.dtype) for r in tracker.records[1:]] == [
        ((2,), torch.float32), ((3,), torch.int64), ((3,), torch.int64),
    ]  # fmt: skip
    assert [(r.death, r.end_phase) for r in tracker.records[:3]] == [(None, ""), (3, "rollout"), (None, "")]
    assert (tracker.current, tracker.peak, len(c)) == (52, 52, 3)
    del old  # after the context
    assert (tracker.records[0].death, tracker.records[0].end_phase) == (4, "forward")


@pytest.mark.parametrize(("birth", "death", "alive"), [
    (0, None, [0, 1, 2, 3]), (2, None, [2, 3]), (0, 2, [0, 1]), (1, 3, [1, 2]), (1, 2, [1]), (2, 3, [2]), (3, 3, []),
])  # fmt: skip
def test_a_storage_is_alive_from_its_allocation_until_the_one_after_its_death(birth, death, alive):
    tracker = LiveTracker()
    tracker.records = [record(birth=birth, death=death)]
    assert [index for index in range(4) if tracker.alive_at(index)] == alive


VOCAB = 100


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(tag="kv cache", shape=(VOCAB,), saved=True), "kv cache"),
        (dict(shape=(2, VOCAB)), "logits"),
        (dict(shape=(VOCAB + 1, 2), saved=True, end_phase="backward"), "logits"),
        (dict(shape=(VOCAB, 2), phase="rollout", end_phase="rollout"), "logits"),
        (dict(shape=(VOCAB - 1, VOCAB - 1), end_phase="forward"), "temporary"),
        (dict(shape=(), end_phase="forward"), "temporary"),
        (dict(end_phase="forward", saved=True), "activations"),
        (dict(end_phase="backward"), "activations"),
        (dict(end_phase="optimizer"), "activations"),
        (dict(end_phase=""), "activations"),  # alive
        (dict(phase="backward", end_phase="backward"), "temporary"),
        (dict(phase="backward", end_phase=""), "activations"),
        (dict(phase="scoring", end_phase="scoring"), "temporary"),
        (dict(phase="scoring", end_phase="backward"), "activations"),
        (dict(phase="scoring", end_phase="scoring", saved=True), "activations"),
        (dict(phase="rollout", end_phase="rollout"), "temporary"),
        (dict(phase="rollout", end_phase="reward"), "rollout"),
        (dict(phase="rollout", end_phase="scoring"), "rollout"),
        (dict(phase="rollout", end_phase=""), "rollout"),
        (dict(phase="rollout", end_phase="rollout", saved=True), "activations"),
        (dict(phase="rollout", end_phase="backward", saved=True), "activations"),
    ],
    ids=str,
)
def test_what_a_storage_was_for(values, expected):
    assert LiveTracker().category(record(**values), VOCAB) == expected


def test_a_use_is_told_once_and_only_of_what_is_counted():
    tracker, counted, unknown = LiveTracker(round_to=1), torch.zeros(2), torch.zeros(3)
    tracker.track_existing([counted])
    with tracker:
        unknown.add_(1)  # seen, and older
        made = counted + 1
    tracker.tag(iter([None, unknown, made.view(2, 1)]), "kv cache")
    tracker.tag([made, counted], "weights")
    assert [r.tag for r in tracker.records] == ["weights", "kv cache"]


class Broken(nn.Module):
    def forward(self, x):
        torch.zeros(9)
        raise ValueError("broken")


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + 1) * 2


def test_a_storage_belongs_to_the_module_that_runs():
    root, tracker = nn.ModuleDict({"first": Outer(nn.Tanh()), "broken": Broken()}), LiveTracker(round_to=1)
    x = torch.zeros(2)
    hooks = len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks)
    with tracker, tracker.naming(root):
        y = root["first"](x)
        with pytest.raises(ValueError, match="broken"):
            root["broken"](x)
        z = nn.Sigmoid()(y) + 1  # not a part of the root: known by its class
    with tracker:
        after = root["first"](x)
    made = [(r.op, r.module) for r in tracker.records]
    assert made[:3] == [("add", "first"), ("tanh", "first.inner"), ("mul", "first")]
    assert made[3:6] == [("zeros", "broken"), ("sigmoid", "Sigmoid"), ("add", "")]
    assert {module for _, module in made[6:]} == {""} and len(z) == len(after) == 2
    assert hooks == (len(nn.modules.module._global_forward_hooks), len(nn.modules.module._global_forward_pre_hooks))




def test_what_autograd_saves_is_marked_and_weights_from_before_are_passed_over():
    w, tracker = torch.ones(2, requires_grad=True), LiveTracker(round_to=1)
    with tracker, tracker.naming(nn.Identity()):
        double = w * 2  # saves no tensor that is counted
        y = double.exp()  # saves its result
        total = y + 1  # saves nothing
    assert [(r.op, r.saved) for r in tracker.records] == [("mul", False), ("exp", True), ("add", False)]
    with tracker:
        (double * w).sum()  # outside: saved, and not marked
    assert not tracker.records[0].saved and total.requires_grad


def test_sites_are_of_one_kind_in_all_layers_and_keep_their_highest():
    class Layer(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.size, self.act1 = size, nn.Tanh()

        def forward(self, x):
            return self.act1(torch.ones(self.size))

    layers = nn.ModuleList([Layer(4) for _ in range(11)])
    root, tracker = nn.ModuleDict({"h": layers, "1b": Layer(4)}), LiveTracker(round_to=1)
    with tracker, tracker.naming(root):
        for module in (layers[0], layers[10], root["1b"]):
            module(None)
        with tracker.during("rollout"):
            layers[3](None)
    assert {key: (site.peak, site.at) for key, site in tracker.sites.items()} == {
        ("forward", "ones", "h.*", (4,)): (16, 0),  # the first of two that are as high
        ("forward", "tanh", "h.*.act1", (4,)): (32, 1),
        ("forward", "ones", "1b", (4,)): (16, 4),
        ("forward", "tanh", "1b.act1", (4,)): (32, 5),
        ("rollout", "ones", "h.*", (4,)): (16, 6),
        ("rollout", "tanh", "h.*.act1", (4,)): (32, 7),
    }


def test_a_site_keeps_its_highest_live_bytes_and_when_they_were():
    tracker, found = LiveTracker(round_to=1), []
    with tracker:
        for held in (2, 5, 3, 5, 6):
            more = torch.zeros(held, dtype=torch.int8)
            x = torch.ones(1, dtype=torch.int8)
            site = tracker.sites["forward", "ones", "", (1,)]
            found.append((site.peak, site.at))
            del more, x
    assert found == [(3, 1), (6, 3), (6, 3), (6, 3), (7, 9)]
    assert len(tracker.sites) == 5


def test_storages_that_are_resized_directly_are_freed_and_come_again():
    tracker = LiveTracker(round_to=1)
    with tracker, tracker.during("rollout"):
        x, other = torch.zeros(100), torch.zeros(1)
    storage = x.untyped_storage()
    storage.resize_(0)
    tracker.resized(x, "gathered")
    assert (tracker.current, tracker.peak) == (4, 404)
    assert (tracker.records[0].death, tracker.records[0].end_phase, tracker.records[0].tag) == (2, "forward", None)
    tracker.resized(x, "gathered")  # nothing is left to free
    assert (tracker.current, len(tracker.records)) == (4, 2)
    storage.resize_(200)
    tracker.resized(x, "gathered")
    assert (tracker.current, tracker.live[-1]) == (204, 204)
    assert [(r.op, r.tag, r.nbytes) for r in tracker.records[1:]] == [
        ("zeros", None, 4),
        ("all_gather", "gathered", 200),
    ]
    old = torch.zeros(2)
    tracker.track_existing([old])
    assert (tracker.records[-1].op, tracker.records[-1].tag) == ("existing", None)
    del x, storage
    assert (tracker.current, tracker.records[2].death, len(other)) == (12, 4, 1)


def test_an_empty_storage_that_nobody_counted_is_passed_over():
    tracker = LiveTracker(round_to=1)
    tracker.resized(torch.zeros(0), "gathered")
    assert (tracker.records, tracker.current) == ([], 0)
    one = torch.zeros(1, dtype=torch.int8)  # the smallest that counts
    tracker.resized(one, "in transit")
    assert [(r.tag, r.nbytes) for r in tracker.records] == [("in transit", 1)]


def test_products_count_their_operations():
    a, b = torch.zeros(2, 3), torch.zeros(3, 5)
    tracker = LiveTracker()
    with tracker:
        a @ b
        assert tracker.flops == 2 * 2 * 3 * 5
        torch.baddbmm(torch.zeros(4, 2, 5), a.expand(4, 2, 3), b.expand(4, 3, 5), beta=0.5, alpha=2.0)
        a.exp().sum()
    assert tracker.flops == 60 + 4 * 60
    a @ b
    assert tracker.flops == 300


def test_an_operator_that_fails_leaves_no_name_behind():
    tracker, old = LiveTracker(), torch.zeros(2, 3)
    with tracker, pytest.raises(RuntimeError):
        old @ old
    tracker.track_existing([old])
    assert [r.op for r in tracker.records] == ["existing"]


def test_fake_tensors_are_counted_and_know_their_device():
    with FakeTensorMode() as mode:
        x = torch.empty(4)
        with LiveTracker(round_to=1) as tracker:
            y = x + 1
            assert (x.device.type, y.device.type) == ("cpu", "cpu")
        assert type(y) is type(x) and mode is x.fake_mode
    assert [(r.op, r.nbytes) for r in tracker.records] == [("add", 16)]


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
