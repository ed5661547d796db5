"""Linear layers on few rows, column by column: the same numbers as torch's, and only where that is quicker."""

import pytest
import torch
from torch.nn import functional as F

from grade.models import decode_linear
from grade.models.decode_linear import SkinnyLinear, skinny_linear


@pytest.mark.parametrize("shape", [(2,), (4,), (5,), (8,), (2, 3)])
@pytest.mark.parametrize("biased", [True, False])
def test_it_is_the_linear_layer(shape, biased):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(*shape, 7, generator=generator), torch.randn(5, 7, generator=generator)
    bias = torch.randn(5, generator=generator) if biased else None
    torch.testing.assert_close(skinny_linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize(
    ("rows", "dtype", "taken"),
    [(1, torch.float32, 0), (2, torch.float32, 1), (8, torch.float32, 1), (9, torch.float32, 0), (2, torch.float64, 0)],
)
def test_it_takes_two_to_eight_rows_of_float32(rows, dtype, taken, monkeypatch):
    calls = []
    monkeypatch.setattr(decode_linear, "skinny_linear", lambda *args: calls.append(args) or skinny_linear(*args))
    x, weight = torch.ones(rows, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)
    with SkinnyLinear():
        F.linear(x, weight)
        assert len(calls) == taken
        F.linear(x, weight, bias=None)  # by keyword: torch's own
        torch.relu(x)
    assert len(calls) == taken
