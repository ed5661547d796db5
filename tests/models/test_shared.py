"""Which models can share a prompt's pass."""

import pytest
import torch
from conftest import make_prompts
from models.zoo import LoraSettings, build

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.samplers import make_sampler


@pytest.mark.parametrize("kind", ["qwen3_5_text", "granitemoehybrid"])
def test_a_state_of_linear_attention_is_not_shared(kind):
    backbone = Backbone(build(kind), None, LoraSettings(r=2, alpha=4, target_modules=["q_proj"]))
    with pytest.raises(InputError, match="sampler: got 'shared'; allowed: own for .*linear attention"):
        make_sampler("shared").sample(backbone, make_prompts(2).repeat(3), 4, torch.Generator())
