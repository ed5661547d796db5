"""What a live tracker writes down of every storage: phase, module, use, sites of allocation, products and messages."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from grade.memory.compat import alone_among
from grade.memory.records import LiveTracker


def test_within_autograd_the_phase_is_backward_whatever_runs():
    w, tracker = torch.ones(3, requires_grad=True), LiveTracker(round_to=1)
    with tracker, tracker.during("loss"):
        loss = (w * 2).sum()
        loss.backward()
        after = torch.zeros(7)
    (gradient,) = [r for r in tracker.records if r.shape == (3,) and r.death is None]
    assert gradient.phase == "backward" and w.grad.tolist() == [2, 2, 2]
    assert tracker.records[0].phase == tracker.records[-1].phase == "loss" and len(after) == 7
    assert {r.phase for r in tracker.records} == {"loss", "backward"}


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
