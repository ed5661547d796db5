"""Expectations over the whole vocabulary against dense formulas."""

import pytest
import torch
from models.test_head import HEADS, D, N, V, make_head

from grade.models import head as head_module
from grade.models.head import embedding_values, expected_values


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_ROWS", 4)


@pytest.mark.parametrize("forbidden", [(), (3, 0, 129)])
@pytest.mark.parametrize("shape", [(N, V), (1, V), (V,)], ids=str)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_expectations_and_gradients_against_dense_logits(options, shape, forbidden):
    head, h, s, weight = make_head(**options), randn(N, D, seed=3).requires_grad_(), randn(*shape, seed=4), randn(N)
    where = torch.arange(N) % 3 != 0
    logits = head(h)
    if forbidden:
        out = torch.zeros(N, V, dtype=torch.bool)
        out[:, list(forbidden)] = where.unsqueeze(1)
        logits = logits.masked_fill(out, -torch.inf)
    want = (logits.softmax(-1) * s).sum(-1)
    got = expected_values(head, h, lambda rows: s[rows] if shape == (N, V) else s, forbidden, where)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, h, weight)[0], torch.autograd.grad(want, h, weight)[0])
    with torch.no_grad():
        assert not expected_values(head, h, lambda rows: s[rows] if shape == (N, V) else s).requires_grad


def test_a_half_precision_model_has_float32_expectations():
    """bfloat16 products of D = 5 terms are off by 2^-8 of their largest; a softmax in bfloat16 would be off by more."""
    head, h = make_head(dtype=torch.bfloat16), randn(N, D, seed=3, dtype=torch.bfloat16)
    table, u = randn(V, D, seed=5, dtype=torch.bfloat16), randn(N, D, seed=6)
    values = embedding_values(table, 0.5, u)
    assert values(torch.arange(2)).dtype == torch.float32
    got = expected_values(head, h, values)
    p, s = head(h).softmax(-1).double(), values(torch.arange(N)).double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), (p * s).sum(-1))  # float32 rounding only: same logits, same values
