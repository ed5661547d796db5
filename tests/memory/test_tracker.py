"""The memory tracker against hand arithmetic, autograd's own hooks and fake tensors."""

from __future__ import annotations

import torch
from conftest import saved_bytes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from grade.experiments.traced import kept_bytes
from grade.memory.tracker import MemoryTracker

B, D, HIDDEN = 8, 16, 64  # float32: x is 8*16*4 = 512 bytes, a hidden activation 8*64*4 = 2048


def mlp(depth: int = 1) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(D, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, D))
        for _ in range(depth)
    ]
    return torch.nn.Sequential(*layers)


def test_counts_what_stays_alive_through_names_and_through_autograd():
    x, w = torch.randn(B, D), torch.randn(D, HIDDEN, requires_grad=True)
    with MemoryTracker(round_to=1) as tracker:
        y = (x @ w).exp()
        # y is alive; x @ w died inside the line, but existed together with y.
        assert (tracker.current, tracker.peak) == (2048, 4096)
        loss = y.sum()
        del y  # exp's backward needs its result: autograd keeps it without any Python name
        assert tracker.current == 2048 + 4
        loss.backward()
        assert tracker.current == 4 + D * HIDDEN * 4  # the loss and the gradient of w
    del loss
    w.grad = None
    assert tracker.current == 0


def test_views_in_place_operators_and_older_tensors_are_not_new_bytes():
    old = torch.zeros(100)
    with MemoryTracker(round_to=1) as tracker:
        new = torch.zeros(100)
        held = [new.view(10, 10), new[3:7], new[None], new.detach(), new.expand(5, 100), new.add_(1)]
        assert tracker.current == 400
        held += [old.view(10, 10), old.mul_(2), old[5:]]
        assert tracker.current == 400
        del new
        assert tracker.current == 400  # a view keeps its whole storage
        del held
        assert tracker.current == 0
        assert tracker.peak == 400


def test_existing_tensors_count_once_when_asked_even_if_seen_before():
    weight = torch.zeros(100)
    tied = weight.view(10, 10)
    with MemoryTracker(round_to=1) as tracker:
        weight.view(5, 20)
        assert tracker.current == 0
        tracker.track_existing([weight, tied])
        assert tracker.current == 400
        weight.add_(1)
        tracker.track_existing([weight])
        assert tracker.current == 400
    del weight, tied
    assert tracker.current == 0


def test_kept_bytes_agrees_with_autograds_hooks_on_a_transformer():
    torch.manual_seed(0)
    # Dropout 0 and math attention on a CPU: everything kept is kept by autograd.
    layer = torch.nn.TransformerEncoderLayer(D, 4, HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
    model, x = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 5, D)
    saved = saved_bytes(lambda: model(x).sum(), exclude=[*model.parameters(), x])
    assert kept_bytes(lambda: model(x).sum()) == saved + 4  # bytes of the sum


def test_fake_tensors_give_the_bytes_of_real_ones():
    def step(model, x, tracker):
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
        current = tracker.current
        loss.backward()
        return current, tracker.current

    with MemoryTracker() as real:
        expected = step(mlp(3), torch.randn(B, D), real)
    with FakeTensorMode(), MemoryTracker() as fake:
        assert step(mlp(3), torch.randn(B, D), fake) == expected
    assert fake.peak == real.peak > 0
