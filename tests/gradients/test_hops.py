"""Hops of the replay engine on a graph of one number a position: how many are taken, and what they give."""

from types import SimpleNamespace

import pytest
import torch

from grade.gradients.replay import ReplayGraph


@pytest.mark.parametrize(
    ("options", "taken"), [({}, 3), ({"tolerance": 0.0}, 3), ({"tolerance": 0.4}, 1), ({"tolerance": 1e-6}, 3)]
)
def test_all_hops_are_taken_unless_a_tolerance_ends_them(options, taken):
    # h = e / 2 and D the identity: a_n = r + a_{n-1} / 2, and each hop adds half of what the last one added.
    e = torch.ones(1, 6, 1, dtype=torch.float64, requires_grad=True)
    graph = SimpleNamespace(e=e, h=e / 2, backbone=SimpleNamespace(anywhere=bool))
    r = torch.ones_like(e).detach()
    v, residual, used = ReplayGraph.adjoint(graph, r, 0.0, lambda a: a, 3, **options)
    assert used == taken
    torch.testing.assert_close(v, r * sum(0.5**n for n in range(taken + 1)))
    assert float(residual) == pytest.approx(0.5**taken / sum(0.5**n for n in range(taken + 1)))
