"""The sampler `http://host:port` with a real vLLM: whose tokens they are and how likely, adapter after adapter.

Log-probabilities are compared in float32, where the issue is other weights or another distribution: 1e-3 nats is far
above rounding (about 1e-5) and far below the effect of an adapter (nats).
"""

import json
from contextlib import nullcontext

import httpx
import pytest
import torch
from conftest import perturb_adapter
from datasets import Dataset
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM
from vllm_server import EOS, VOCAB, prompts_of, save_base

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.head import NOTHING
from grade.models.samplers import make_sampler
from grade.models.scoring import completion_logps, predicting_hidden
from grade.models.teacher import make_teacher

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


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def mismatch(backbone, prompts, samples, least=0):
    return samples.mismatch(completion_logps(backbone, prompts, samples.ids, samples.mask, min_new_tokens=least))


def agree(backbone, sampler, tokens=16):
    """Publish, sample, and hold the log-probabilities against the policy's and against its base's."""
    sampler.publish(backbone)
    prompts = prompts_of(4).repeat(4)
    samples = sampler.sample(backbone, prompts, tokens, generator(), 2)
    found = mismatch(backbone, prompts, samples, 2)
    assert found.largest_difference < BOUND and abs(found.mean_ratio - 1) < BOUND
    with backbone.reference():
        assert mismatch(backbone, prompts, samples, 2).largest_difference > 100 * BOUND  # the adapter was on


@pytest.fixture
def sampler(engine, tmp_path):
    made = make_sampler(engine.address, 300.0, tmp_path / "adapters")
    yield made
    made.close()
    assert engine.names() == ["base"] and not list((tmp_path / "adapters").iterdir())


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_on_every_kind_of_layer(case, base, sampler):
    agree(policy(base, **ADAPTERS[case]), sampler)


@pytest.mark.parametrize("kind", FAMILIES)
def test_families_with_other_layers(kind, engines, tmp_path):
    engine, folder = engines(), save_base(tmp_path / kind, kind, **FAMILIES[kind])
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = {name.rsplit(".", 1)[-1] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    engine.start(folder)
    sampler = make_sampler(engine.address, 300.0, tmp_path)
    for names in (sorted(layers - {"lm_head"}), *([name] for name in sorted(layers - {"lm_head"}))):
        agree(policy(folder, scale=0.1, target_modules=names), sampler)
    engine.kill()


def test_what_the_server_refuses_is_its_own_line(base, sampler, tmp_path):
    with pytest.raises(InputError, match="load_lora_adapter: .* said: .*rank 32 is greater than max_lora_rank 16"):
        sampler.publish(Backbone.load(base, lora=LoraSettings(r=32, alpha=8)))


def test_the_next_step_has_the_next_adapter(base, engine, sampler):
    """Five of them, with room for two; one name at a time, and the same seeds."""
    prompts, names = prompts_of(4).repeat(2), []
    steps = [policy(base, seed) for seed in range(5)]
    for number, backbone in enumerate(steps):
        names.append(sampler.publish(backbone))
        assert engine.names() == ["base", names[-1]]
        samples = sampler.sample(backbone, prompts, 8, generator(), 2)
        assert mismatch(backbone, prompts, samples, 2).largest_difference < BOUND
        if number:
            assert mismatch(steps[number - 1], prompts, samples, 2).largest_difference > 100 * BOUND
    assert len(set(names)) == 5
    sampler.close()
    with pytest.raises(InputError, match=f"{names[-1]}.*does not exist"):  # not the base in its place
        sampler.sample(steps[-1], prompts, 8, generator(), 2)


def test_completions_of_a_prompt_are_distinct(base, engine, sampler):
    """130 of one prompt, which are two requests, and of 70 prompts, more than connections: none twice, all again."""
    backbone = policy(base)
    sampler.publish(backbone)
    for prompts in (prompts_of(1).repeat(130), prompts_of(70)):
        samples, again = (sampler.sample(backbone, prompts, 24, generator(1), 24) for _ in range(2))
        assert len({tuple(row) for row in samples.ids.tolist()}) == len(samples.ids) == len(prompts.ids)
        assert mismatch(backbone, prompts, samples, 24).largest_difference < BOUND
        assert torch.equal(samples.ids, again.ids)


def test_short_completions(base, sampler):
    """Some end at once; with a least length none before it, and the probabilities are those without an end."""
    backbone = policy(base).view(temperature=2.0)
    sampler.publish(backbone)
    prompts = prompts_of(4).repeat(64)
    for least in (0, 1, 12):
        samples = sampler.sample(backbone, prompts, 24, generator(), least)
        lengths = samples.mask.sum(1)
        assert least < lengths.min() < 24 == lengths.max()
        ends = ((samples.ids == EOS) & samples.mask.bool()).sum(1)
        assert torch.equal(ends, (samples.ids.gather(1, lengths.unsqueeze(1) - 1) == EOS)[:, 0].long())
        assert mismatch(backbone, prompts, samples, least).largest_difference < BOUND
    assert mismatch(backbone, prompts, samples).largest_difference > BOUND  # an end was forbidden


def test_a_server_with_other_defaults(base, engine, sampler):
    """They are there, as a request without parameters shows. Ours has its own, and is not cut at 8 tokens."""
    backbone = policy(base)
    sampler.publish(backbone)
    body = {"model": sampler.model, "prompt": [5, 6, 7], "max_tokens": 24, "n": 32, "return_token_ids": True}
    plain = json.loads(sampler.post("/v1/completions", body | {"logprobs": 0, "seed": 1}))["choices"]
    prompts = prompts_of(1).repeat(32)
    samples = sampler.sample(backbone, prompts, 24, generator(), 24)
    variety = [len({ids[0] for ids in rows}) for rows in ([c["token_ids"] for c in plain], samples.ids.tolist())]
    assert variety[0] <= 5 < variety[1]  # top_k is 5
    assert mismatch(backbone, prompts, samples, 24).largest_difference < BOUND


@pytest.fixture(scope="module")
def teacher(engines, base):
    """A server of the base alone: with adapters vLLM 0.32 on a CPU scores the prompt of one request at a time."""
    made = engines()
    made.start(base, "--no-enable-lora")
    yield made.address
    made.kill()


def test_a_teacher_behind_a_server(base, teacher, engine, sampler):
    """The base, and an adapter by its name: log-probabilities of the likeliest tokens and of the text's own."""
    backbone, prompts = policy(base), prompts_of(8, 7)
    sampler.publish(backbone)
    ids = torch.randint(2, VOCAB, (8, 9), generator=generator(1))
    mask = (torch.arange(9) < torch.tensor([9, 1, 2, 3, 4, 9, 9, 9]).unsqueeze(1)).long()
    for address, rows in ((teacher, 8), (f"{engine.address}#{sampler.model}", 1)):
        with torch.no_grad(), backbone.reference() if address == teacher else nullcontext():
            want = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
        known = make_teacher(address, policy(base, 1), topk=20)
        got = known.hidden(prompts[:rows], ids[:rows], mask[:rows])
        for place in mask[:rows].nonzero().tolist():
            tokens, logq, real = got.ids[*place], got.logq[*place], want[*place]
            assert {ids[*place].item(), *real.topk(20).indices.tolist()} == set(tokens.tolist())
            assert (logq[:-1] - real[tokens])[logq[:-1] > NOTHING].abs().max() < BOUND
            assert (logq[-1] - real.index_fill(0, tokens, -torch.inf).logsumexp(0)).abs() < BOUND
    with pytest.raises(InputError, match="teacher: POST .*teacher_topk.*said: .*21.* greater than max allowed: 20"):
        make_teacher(teacher, backbone, topk=21).hidden(prompts, ids, mask)
    longest, ids = make_teacher(teacher, backbone), ids[:1].repeat(1, 4)
    longest.hidden(prompts_of(1, 100), ids[:, :27])
    with pytest.raises(
        InputError, match="teacher: got .*; allowed: at most 126 tokens, the teacher's context, not 127"
    ):
        longest.hidden(prompts_of(1, 100), ids[:, :28])


def test_training_from_a_teacher_behind_a_server(base, teacher, tmp_path):
    """The base with a context, of all tokens the 20 likeliest; against the same model here, and what it learns."""
    rows = Dataset.from_list([{"prompt": f"w5 w9 w{number}"} for number in range(2, 10)])
    values = dict(
        method="teacher", per_device_train_batch_size=8, max_steps=12, max_completion_length=8, learning_rate=1e-2,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", teacher_context="w7 w3 w8 w8 ",
        lr_scheduler_type="constant",
    )  # fmt: skip
    logs = {}
    for name in ("base", teacher):
        backbone = Backbone.load(base, lora=LoraSettings(r=4, alpha=8))
        made = GradeTrainer(backbone, [], GradeConfig(str(tmp_path), teacher=name, **values), rows)
        made.train()
        logs[name] = [row for row in made.state.log_history if "reward" in row]
    served, here = logs[teacher], logs["base"]
    assert here[0]["reward"] < served[0]["reward"] < 0  # the same completions; a lower bound of the divergence
    assert served[-1]["reward"] > 0.7 * served[0]["reward"]  # 0.55 with a server of transformers
    assert 0 < served[0]["teacher/rest_teacher"] < 1
    assert httpx.get(teacher + "/version").json()["version"].startswith("0.32.0")
