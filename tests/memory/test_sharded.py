"""A step of one process among several, traced."""

import json

import pytest

from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.settings import StepConfig
from grade.memory.trace import trace

SMALL = dict(model="tiny", dtype="float32", batch_size=2, prompt_tokens=4, max_new_tokens=3, gumbel_topk=8)
CHECKPOINTED = StepConfig(**SMALL, gradient_checkpointing=True)


@pytest.fixture(scope="module")
def alone():
    return trace(CHECKPOINTED)


def test_with_copies_of_the_base_only_the_adapters_gradients_travel(alone):
    found = trace(CHECKPOINTED, processes=4, sharding="ddp")
    assert found.peak == alone.peak and found.categories == alone.categories
    # 57,344 bytes of adapter; a sum over 4 processes needs 3/4 of it twice, to add up and to hand out.
    assert alone.categories["adapter"] == 57_344 and found.received == 57_344 * 6 // 4
    assert alone.received == 0


def test_the_base_is_divided_and_gathered_layer_by_layer(alone):
    two, four = (trace(CHECKPOINTED, processes=n) for n in (2, 4))
    held = [found.phases["optimizer"]["weights"] for found in (alone, two, four)]  # nothing is folded or gathered then
    # Norms of 64 elements are 256 bytes, and 512 in a block whether whole or divided; rotary frequencies stay whole.
    assert held[1] == pytest.approx(held[0] / 2, rel=0.02) and held[2] == pytest.approx(held[0] / 4, rel=0.04)
    # Gathered tensors are the same however many processes there are; each receives all but its own share of them.
    # While the first token is sampled: table and head of 512 x 64 numbers, a layer's four projections, its MLP and two
    # norms (512 in a block each), and the last norm. Its flat buffer is kept until that of the next one has arrived.
    layer = 4 * 64 * (64 + 32 + 32 + 64) + 4 * 3 * 64 * 96
    assert two.categories["gathered"] == four.categories["gathered"] == 2 * 4 * 512 * 64 + layer + 3 * 512
    assert two.categories["in transit"] == 2 * (layer + 2 * 256)
    assert two.phases["optimizer"]["gathered"] == two.phases["optimizer"]["in transit"] == 0
    assert four.received / two.received == pytest.approx((3 / 4) / (1 / 2))
    for name in ("adapter", "optimizer"):
        assert two.categories[name] == alone.categories[name]


@pytest.mark.parametrize("method", ["ste", "grpo"])
def test_layers_that_are_not_traced_are_divided_too(tmp_path, method):
    config = model_config("tiny")
    config.num_hidden_layers = 7
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    values = SMALL | {"model": str(tmp_path), "method": method}
    if method == "grpo":
        values = {name: v for name, v in values.items() if name != "gumbel_topk"} | {"num_generations": 2}
    step = StepConfig(**values)
    full, short = (trace(step, processes=3, all_layers=every) for every in (True, False))
    assert (full.traced_layers, short.traced_layers) == (7, 3)
    assert short.peak == full.peak and short.categories == full.categories and short.received == full.received


def test_weights_that_are_all_trained_are_not_divided():
    with pytest.raises(InputError, match="adapter"):
        trace(StepConfig(**SMALL, adapter="full"), processes=2)
    with pytest.raises(InputError, match="gpus"):
        trace(CHECKPOINTED, processes=0)
