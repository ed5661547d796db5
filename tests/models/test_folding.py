"""The adapter folded into its weights: the same policy, the weights as before afterwards, bit by bit."""

import pytest
import torch
from conftest import make_backbone, make_prompts, perturb_adapter, tiny_config, tiny_gpt2
from peft import LoraConfig
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from grade.errors import InputError
from grade.models.adapter import continued_adapter, folded
from grade.models.backbone import Backbone


def weights(backbone):
    return {name: value.clone() for name, value in backbone.model.state_dict().items()}


def test_weights_come_back_bit_by_bit_also_when_something_fails(backbone):
    before = weights(backbone)
    with pytest.raises(KeyError), backbone.merged():
        changed = weights(backbone)
        raise KeyError
    assert not all(torch.equal(changed[name], value) for name, value in before.items())
    assert all(torch.equal(value, before[name]) for name, value in weights(backbone).items())


def test_a_weight_that_comes_twice_is_put_back_to_its_first_value(backbone):
    """Refused when a backbone is built; should it happen all the same, the base must survive it."""
    (_, first), (_, second) = [
        (n, layer) for n, layer in backbone.model.named_modules() if n.endswith("q_proj")
    ]
    second.get_base_layer().weight = first.get_base_layer().weight
    before = first.get_base_layer().weight.clone()
    for _ in range(2):
        with folded(backbone.model):
            assert not torch.equal(first.get_base_layer().weight, before)
    assert torch.equal(first.get_base_layer().weight, before)


def test_nothing_is_folded_while_the_adapter_is_off(backbone):
    before = weights(backbone)
    with backbone.reference(), folded(backbone.model):
        assert all(torch.equal(value, before[name]) for name, value in weights(backbone).items())


class ReadsWeights(LlamaMLP):
    """Uses the weight of a linear layer without calling the layer, as absorbed projections do."""

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * F.linear(x, self.up_proj.weight))


def reader():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.__class__ = ReadsWeights
    return model


def test_a_layer_whose_weight_is_read_elsewhere_is_refused_by_name():
    """A pass leaves its adapter out, sampling would not."""
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    with pytest.raises(
        InputError, match=r"lora.target_modules: got \['up_proj'\]; allowed: layers that the model calls"
    ):
        Backbone(reader(), lora=LoraConfig(r=2, target_modules=targets))
    targets.remove("up_proj")
    Backbone(reader(), lora=LoraConfig(r=2, target_modules=targets))


@pytest.mark.parametrize("config", [tiny_config(), tiny_gpt2()])
def test_the_check_leaves_adapter_generators_and_switches_as_they_were(config):
    targets = ["c_attn", "wpe"] if config.model_type == "gpt2" else ["q_proj", "up_proj"]
    backbone = make_backbone(config, torch.float32, target_modules=targets)
    before, state, prompts = weights(backbone), torch.get_rng_state(), make_prompts()
    embeds = backbone.embed(prompts.ids)
    policy = backbone.hidden(embeds, prompts.mask)
    trained = [p.requires_grad for p in backbone.model.parameters()]
    continued_adapter(backbone.peft)
    assert all(torch.equal(value, before[name]) for name, value in weights(backbone).items())
    assert torch.equal(torch.get_rng_state(), state) and not backbone.model.training
    assert torch.equal(backbone.hidden(embeds, prompts.mask), policy)
    assert [p.requires_grad for p in backbone.model.parameters()] == trained and any(trained)


@pytest.mark.parametrize("scale", [0, 1e-8, 1e4])
def test_any_scale_can_be_checked(scale):
    """Also 0, an adapter that does nothing, and weights of any size."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(scale)
    backbone = Backbone(model, lora=LoraConfig(r=2, lora_alpha=scale, target_modules=["q_proj"]))
    perturb_adapter(backbone)


def test_a_half_precision_base_is_neither_folded_nor_checked(monkeypatch):
    monkeypatch.setattr("grade.models.adapter._folds", lambda *_: pytest.fail("checked"))
    backbone = make_backbone(dtype=torch.bfloat16)
    before = weights(backbone)
    with backbone.merged():
        assert all(torch.equal(value, before[name]) for name, value in weights(backbone).items())
