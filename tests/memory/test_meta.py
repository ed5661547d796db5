"""A trace sees no difference between operators on meta tensors and what is cached of them."""

import pytest

from grade.memory import meta as without_data
from grade.memory.models import model_config
from grade.memory.settings import StepConfig
from grade.memory.trace import trace_layers


@pytest.mark.parametrize("values", [dict(method="gumbel_legacy", reward="trunk"), dict(method="ste", dtype="bfloat16")])
def test_a_trace_is_the_same_with_and_without(values, monkeypatch):
    config = StepConfig(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=3, **values)
    found = [trace_layers(config, model_config("tiny"), "cuda") for _ in range(2)]
    monkeypatch.setattr(without_data, "call_on_meta", lambda func, args, kwargs: func(*args, **kwargs))
    found.append(trace_layers(config, model_config("tiny"), "cuda"))
    first, *others = ([(r.nbytes, r.shape, r.dtype, r.op, r.birth, r.live, r.death) for r in t.records] for t in found)
    assert all(other == first for other in others)
    assert found[0].flops == found[2].flops
