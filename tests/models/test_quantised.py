"""A base in 4 or 8 bits against the same base with the weights that its numbers stand for."""

import re

import pytest
import torch
from conftest import EOS, ToyReward, gradient, make_prompts, perturb_adapter, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from grade.gradients.engines import make_engine
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.learner import StepContext
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.memory.models import TINY
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone

bnb = pytest.importorskip("bitsandbytes")

SETTINGS = [
    dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    dict(load_in_8bit=True),
]
LORA = LoraSettings(r=2, alpha=4)
T = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with columns that are large in some tokens, which LLM.int8 treats apart."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(hidden_size=64, intermediate_size=64))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[5] = 8.0
    model.save_pretrained(path := tmp_path_factory.mktemp("base"))
    return path


def quantised(folder, settings, **options):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**settings), **options)


def dequantised(folder, settings):
    """The base with each quantised layer replaced by a plain one with its weights in float32."""
    model, stored = AutoModelForCausalLM.from_pretrained(folder), quantised(folder, settings)
    for name, layer in stored.named_modules():
        if isinstance(layer, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        elif isinstance(layer, bnb.nn.Linear8bitLt):
            weight = layer.weight.data * layer.weight.SCB.unsqueeze(1) / 127
        else:
            continue
        plain = model.get_submodule(name)
        assert type(plain) is nn.Linear and not torch.equal(plain.weight, weight)
        plain.weight.data = weight.float()
    return model


def relaxed(backbone, objective):
    config = RelaxationConfig(estimator="ste", gumbel_topk=7, max_new_tokens=T, tau=0.9)
    step = make_engine("replay", 2)(backbone, make_prompts(), objective, config, torch.Generator().manual_seed(4), 1.0)
    return step.completion_ids * step.completion_mask


def rloo(backbone, objective):
    learner = PolicyGradient(MethodConfig(method="rloo", max_completion_length=T, num_generations=2), backbone)
    microbatch = (make_prompts().repeat(2), torch.Generator().manual_seed(4))
    [part] = learner.step([microbatch], objective, StepContext(1, lambda: None))
    return part.completion_ids * part.completion_mask


@pytest.mark.parametrize("method", [relaxed, rloo])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_samples_and_gradients_are_those_of_the_dequantised_base(folder, settings, method):
    """float32: products differ by the order of their sums, which leaves 1e-6; inputs in 8 bits would leave 1e-2."""
    results = []
    for model in (quantised(folder, settings), dequantised(folder, settings)):
        backbone = perturb_adapter(Backbone(model, None, LORA))
        objective = Objective(ToyReward(64, torch.float32), 0.3)
        results.append((method(backbone, objective), gradient(backbone)))
    (ids, got), (expected_ids, want) = results
    assert torch.equal(ids, expected_ids) and torch.isin(ids, torch.tensor(EOS)).any()
    assert want.norm() > 1e-4
    assert (got - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_adapter_of_the_quantised_base_is_one_of_the_base_and_back(folder, settings, tmp_path):
    """As when the base is quantised for training alone, or for serving alone."""
    trained = perturb_adapter(Backbone(quantised(folder, settings), None, LORA))
    trained.save_adapter(tmp_path / "trained")
    loaded = Backbone(AutoModelForCausalLM.from_pretrained(folder), adapter=tmp_path / "trained")
    loaded.save_adapter(tmp_path / "loaded")
    served = Backbone(quantised(folder, settings), adapter=tmp_path / "loaded")
    for other in (loaded, served):
        assert all(map(torch.equal, trained.trainable_parameters(), other.trainable_parameters()))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_trace_has_the_weights_and_the_peak_of_the_real_step(tmp_path, settings):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path)
    config = StepConfig(
        model=str(tmp_path), batch_size=2, prompt_tokens=4, max_new_tokens=2, gumbel_topk=8, dtype="float32",
        quantization_config=settings,
    )  # fmt: skip
    traced = trace(config, device="cpu", all_layers=True)
    backbone = Backbone(quantised(tmp_path, settings), None, LoraSettings())
    # bitsandbytes keeps scales outside of parameters and buffers, and adds descriptions where they are saved.
    base = {name: t for name, t in backbone.model.state_dict().items() if "lora_" not in name}
    named = {name: t for name, t in base.items() if not re.search("quant_state|weight_format", name)}
    step = make_step(config, backbone, build(config.changed(quantization_config=None), device="cpu")[1])
    reward = step.others[0]
    others = [*backbone.buffers(), *reward.parameters(), *reward.buffers()]
    offsets = 512 * 14 if "bnb_4bit_use_double_quant" in settings else 0  # one number a layer, in a description
    real = blocks([*named.values(), *others]) + offsets
    assert traced.categories["weights"] == real
    tracker = run_tracked(step, device="cpu")
    assert traced.peak - real == tracker.peak - blocks(
        [p for p in backbone.parameters() if not p.requires_grad] + others
    )


def blocks(tensors):
    """Bytes of storages in blocks of 512."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(-(-size // 512) * 512 for size in sizes.values())
