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


def looks(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type, value.untyped_storage().nbytes()
    return tuple(looks(v) for v in value) if isinstance(value, tuple | list) else value


CALLS = [
    (aten.mul.Tensor, (meta(3, 1), meta(4)), {}),
    (aten.add.Tensor, (meta(4, 3).t(), meta(3, 4)), {"alpha": 2}),
    (aten.mm.default, (meta(2, 3), meta(3, 5)), {}),
    (aten.native_layer_norm.default, (meta(2, 3, 4), [4], meta(4), meta(4), 1e-5), {}),
    (aten.topk.default, (meta(2, 9), 3), {}),
    (aten.sum.dim_IntList, (meta(2, 9), [1], True), {"dtype": torch.float64}),
    (aten._to_copy.default, (meta(3, 2).t(),), {"dtype": torch.bfloat16}),
    (aten.cat.default, ([meta(2, 3), meta(4, 3)],), {}),
    (aten.index.Tensor, (meta(5, 3), [None, meta(2, dtype=torch.long)]), {}),
    (aten.zeros_like.default, (meta(2, 3),), {"dtype": torch.bool}),
    (aten.bernoulli.default, (meta(3),), {"generator": None}),
]


@pytest.mark.parametrize(("func", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_an_output_is_made_again_as_the_operator_makes_it(func, args, kwargs):
    first, again = call_on_meta(func, args, kwargs), call_on_meta(func, args, kwargs)
    assert looks(first) == looks(again) == looks(func(*args, **kwargs))


def test_an_operator_in_place_returns_its_argument_from_memory():
    for x in (meta(2, 3), meta(2, 3)):
        assert call_on_meta(aten.add_.Tensor, (x, meta(3)), {"alpha": 2}) is x
    with pytest.raises(RuntimeError, match="shape"):  # an error is not remembered as a result
        call_on_meta(aten.add_.Tensor, (meta(2, 3), meta(4)), {})


@pytest.mark.parametrize(("func", "args"), [(aten.t_.default, ()), (aten.resize_.default, ([7],))], ids=str)
def test_an_operator_in_place_that_changes_a_shape_is_computed_each_time(func, args):
    for x in (meta(2, 3), meta(2, 3)):
        other = meta(2, 3)
        assert looks(call_on_meta(func, (x, *args), {})) == looks(func(other, *args)) == looks(x)


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
    first, *others = ([(r.nbytes, r.shape, r.dtype, r.op, r.birth, r.death) for r in t.records] for t in found)
    assert all(other == first for other in others)
    assert found[0].live == found[2].live and found[0].flops == found[2].flops
