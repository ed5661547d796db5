"""The sampler with a real vLLM: whose tokens they are and how likely, adapter after adapter.

Log-probabilities are compared in float32, where the issue is other weights or another distribution: 1e-3 nats is far
above rounding (about 1e-5) and far below the effect of an adapter (nats).
"""

import pytest
import torch
from conftest import make_prompts, perturb_adapter
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM
from vllm_server import EOS, save_base

from grade import GradeConfig
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.scoring import completion_logps
from grade.training.served import StepSampler

BOUND = 1e-3
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS = {"all layers": {}} | {name: dict(target_modules=[name]) for name in LLAMA} | {
    "rank-stabilised": dict(use_rslora=True),
    "ranks of their own": dict(rank_pattern={"q_proj": 2, "down_proj": 8}),
    "scales of their own": dict(alpha_pattern={"k_proj": 32, "up_proj": 1}),
    "one layer of two": dict(layers_to_transform=[1]),
}  # fmt: skip
FAMILIES = {
    "phi3": dict(original_max_position_embeddings=256),  # one layer for q, k and v, and one for gate and up
    "qwen3": {}, "gemma3_text": dict(sliding_window=8, query_pre_attn_scalar=32),
}  # fmt: skip


def policy(folder, seed=0, scale=0.3, **lora):
    values = dict(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", target_modules=list(LLAMA)) | lora
    return perturb_adapter(Backbone.load(folder, lora=LoraConfig(**values)), seed, scale)


def sampler_of(engine, folder, tokens=16, least=2, temperature=1.0):
    return StepSampler(GradeConfig(
        method="reinforce", sampler=engine.address, sampler_folder=str(folder), temperature=temperature, use_cpu=True,
        max_completion_length=tokens, min_completion_length=least, sampler_max_difference=BOUND,
    ))  # fmt: skip


def sample(sampler, backbone, prompts, step=1, seed=0):
    """Completions, whose log-probabilities the sampler itself holds against the policy's."""
    completions, figures = sampler.sample(backbone, prompts, torch.Generator().manual_seed(seed), step)
    assert figures["sampler/largest_difference"] < BOUND
    return completions


@pytest.fixture
def folder(engine, tmp_path):
    yield tmp_path / "adapters"
    assert engine.names() == ["base"] and not list((tmp_path / "adapters").iterdir())


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_on_every_kind_of_layer(case, base, engine, folder):
    sampler, backbone, prompts = sampler_of(engine, folder), policy(base, **ADAPTERS[case]), make_prompts(4).repeat(4)
    drawn = sample(sampler, backbone, prompts)
    sampler.close()
    with torch.no_grad():
        on = completion_logps(backbone, prompts, drawn.ids, drawn.mask, 2)
        with backbone.reference():
            off = completion_logps(backbone, prompts, drawn.ids, drawn.mask, 2)
    assert (on - off).abs().max() > 100 * BOUND


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_with_other_layers(kind, engines, tmp_path):
    engine, base = engines(), save_base(tmp_path / kind, kind, **FAMILIES[kind])
    model = AutoModelForCausalLM.from_pretrained(base)
    layers = {name.rsplit(".", 1)[-1] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    engine.start(base)
    sampler = sampler_of(engine, tmp_path / "adapters")
    names = sorted(layers - {"lm_head"})
    for step, some in enumerate((names, *([name] for name in names))):
        sample(sampler, policy(base, scale=0.1, target_modules=some), make_prompts(4).repeat(4), step)
    engine.kill()


def test_the_next_step_has_the_next_adapter(base, engine, folder):
    """Five of them, with room for two; one name at a time, and the same seeds."""
    sampler, names = sampler_of(engine, folder, 8), []
    for step in range(5):
        sample(sampler, policy(base, step), make_prompts(4).repeat(2), step)
        names.append(sampler.name)
        assert engine.names() == ["base", names[-1]]
    assert len(set(names)) == 5
    with pytest.raises(InputError, match="sampler: mean difference"):  # the step's adapter, and another policy
        sample(sampler, policy(base, 7), make_prompts(4), 4)
    sampler.close()


def test_completions_of_a_prompt_are_distinct(base, engine, folder):
    """130 of one prompt, and of 70 prompts, more than requests at once: none twice, all again."""
    sampler, backbone = sampler_of(engine, folder, 24, 24), policy(base)
    for prompts in (make_prompts(1).repeat(130), make_prompts(70)):
        drawn, again = (sample(sampler, backbone, prompts, seed=1) for _ in range(2))
        assert len({tuple(row) for row in drawn.ids.tolist()}) == len(drawn.ids) == len(prompts.ids)
        assert torch.equal(drawn.ids, again.ids)
    sampler.close()


@pytest.mark.parametrize("least", [0, 1, 12])
def test_short_completions(least, base, engine, folder):
    """Some end at once; with a least length none before it, and the probabilities are those without an end."""
    sampler = sampler_of(engine, folder, 24, least, temperature=2.0)
    drawn = sample(sampler, policy(base).view(temperature=2.0), make_prompts(4).repeat(64))
    sampler.close()
    lengths = drawn.mask.sum(1)
    assert least < lengths.min() < 24 == lengths.max()
    ends = ((drawn.ids == EOS) & drawn.mask.bool()).sum(1)
    assert torch.equal(ends, (drawn.ids.gather(1, lengths.unsqueeze(1) - 1) == EOS)[:, 0].long())
