"""The fingerprint of frozen weights: the same in every type and under an adapter, another for other weights."""

import pytest
import torch
from conftest import tiny_config, tiny_gpt2
from torch import nn
from transformers import AutoModelForCausalLM

from grade.models.parameters import fingerprint, same_base


def bare(seed=0, config=None):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config or tiny_config(), dtype=torch.float32)


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


def test_a_fingerprint_is_the_same_for_ever():
    """Folders on disk hold it; an adapter whose base is another one by it is refused."""
    layer = nn.Linear(9, 11)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(99.0).view(11, 9) / 7)
        layer.bias.copy_(torch.arange(11.0) / 3)
    known = {"shapes": "a5768490edf22e88", "bfloat16": "8b995f420499e131", "float16": "583493329ae543bb"}
    assert {name: text[:16] for name, text in fingerprint(layer).items()} == known
