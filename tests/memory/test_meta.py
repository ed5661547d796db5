"""What is cached of operators on meta tensors is what they return, and a trace sees no difference."""

import pytest
import torch

from grade.memory import meta as without_data
from grade.memory.meta import call_on_meta
from grade.memory.models import model_config
from grade.memory.settings import StepConfig
from grade.memory.trace import trace_layers

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_calls_that_only_look_alike_are_told_apart():
    x = meta(2, 3, dtype=torch.long)
    types = [call_on_meta(aten.mul.Tensor, (x, other), {}).dtype for other in (1, 1.0, True)]
    assert types == [torch.long, torch.float32, torch.long]
    torch.set_default_dtype(torch.float64)
    try:
        assert call_on_meta(aten.mul.Tensor, (x, 1.0), {}).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert call_on_meta(aten.mul.Tensor, (meta(3, 2).t(), 2.0), {}).stride() == (1, 2)
    assert call_on_meta(aten.mul.Tensor, (meta(2, 3), 2.0), {}).stride() == (3, 1)


@pytest.mark.parametrize("values", [dict(method="gumbel_legacy", reward="trunk"), dict(method="ste", dtype="bfloat16")])
def test_a_trace_is_the_same_with_and_without(values, monkeypatch):
    config = StepConfig(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=3, **values)
    found = [trace_layers(config, model_config("tiny"), "cuda") for _ in range(2)]
    monkeypatch.setattr(without_data, "call_on_meta", lambda func, args, kwargs: func(*args, **kwargs))
    found.append(trace_layers(config, model_config("tiny"), "cuda"))
    first, *others = ([(r.nbytes, r.shape, r.dtype, r.op, r.birth, r.live, r.death) for r in t.records] for t in found)
    assert all(other == first for other in others)
    assert found[0].flops == found[2].flops
