"""The fingerprint of frozen weights: the same in every type and under an adapter, another for other weights."""

import pytest
import torch
from conftest import make_backbone, tiny_config, tiny_gpt2
from torch import nn
from transformers import AutoModelForCausalLM

from grade.models.fingerprint import fingerprint, same_base

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def bare(seed=0, config=None):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config or tiny_config(), dtype=torch.float32)


@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("second", TYPES)
def test_types_do_not_matter(first, second):
    """Each is rounded from float32 once, as loading does."""
    one, two = fingerprint(bare().to(first)), fingerprint(bare().to(second))
    assert same_base(one, two)
    other = fingerprint(bare(1).to(second))
    assert same_base(one, other) == ({first, second} == {torch.bfloat16, torch.float16})  # no rounding in common


def test_an_adapter_is_passed_over():
    backbone = make_backbone(seed=0)
    torch.manual_seed(0)
    want = fingerprint(AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float64))
    assert fingerprint(backbone.model) == want and set(want) == {"shapes", "bfloat16", "float16"}


@pytest.mark.parametrize("which", range(3))
def test_every_tensor_counts(which):
    model, before = bare(), fingerprint(bare())
    parameter = list(model.parameters())[[0, 7, -1][which]]
    with torch.no_grad():
        parameter.mul_(1 + 2**-7)  # one step of bfloat16
    after = fingerprint(model)
    assert after["shapes"] == before["shapes"] and not same_base(before, after)


def test_names_and_shapes_count():
    assert not same_base(fingerprint(bare()), fingerprint(bare(config=tiny_gpt2())))
    wide, tall = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        wide.weight.fill_(1), tall.weight.fill_(1)
    one, two = fingerprint(wide), fingerprint(tall)
    assert one["bfloat16"] == two["bfloat16"] and not same_base(one, two)


def test_weights_without_contents_have_none():
    with torch.device("meta"):
        assert fingerprint(nn.Linear(4, 4)) == {}
    assert same_base({}, fingerprint(nn.Linear(4, 4)))
    assert set(fingerprint(nn.Module())) == {"shapes", "bfloat16", "float16"}


def test_a_fingerprint_is_the_same_for_ever():
    """Folders on disk hold it; an adapter whose base is another one by it is refused."""
    layer = nn.Linear(9, 11)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(99.0).view(11, 9) / 7)
        layer.bias.copy_(torch.arange(11.0) / 3)
    known = {"shapes": "a5768490edf22e88", "bfloat16": "8b995f420499e131", "float16": "583493329ae543bb"}
    assert {name: text[:16] for name, text in fingerprint(layer).items()} == known
