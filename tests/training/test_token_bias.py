"""Training, resuming, generating from and merging policies with a token bias."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, generator, make_backbone, make_prompts, perturb_adapter, word_tokenizer
from models.test_backbone import FAMILIES
from safetensors.torch import load_file
from training.runs import settings, toy_project, toy_trainer
from training.test_resume import interrupted, silent
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.adapter import BASE_FILE, LoraSettings
from grade.models.backbone import Backbone
from grade.models.scoring import predicting_hidden
from grade.models.token_bias import BIAS_FILE
from grade.training.kl_budget import BatchKL, scale_adapter
from grade.training.merge import LOGIT_BIAS_FILE, add_token_bias, merge
from grade.training.run import train
from grade.training.served import StepSampler
from grade.training.toy import toy_task


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return toy_project(tmp_path_factory.mktemp("project")) | {
        "max_steps": 4, "eval_strategy": "no", "train_bias": True, "save_total_limit": None,
    }  # fmt: skip


def bias_of(folder):
    return load_file(folder / BIAS_FILE)["token_bias"]


@pytest.mark.parametrize("method", ["ste", "rloo"])
def test_a_trained_bias_resumes_to_the_same_bits_and_is_part_of_the_result(method, common, tmp_path, monkeypatch):
    assert train(settings(method, common, tmp_path / "whole"), silent).step == 4
    interrupted(common, tmp_path / "again", monkeypatch, method)
    assert bias_of(tmp_path / "again" / "checkpoint-2").abs().max() > 0
    assert train(settings(method, common, tmp_path / "again"), silent, "yes").step == 4
    whole, again = (tmp_path / name / "adapter" for name in ("whole", "again"))
    for name in (BIAS_FILE, "adapter_model.safetensors", "optimizer.pt", "../history.csv", "../metrics.json"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    at_2 = tmp_path / "whole" / "checkpoints" / "step-2"
    assert bias_of(at_2).shape == bias_of(whole).shape and not torch.equal(bias_of(at_2), bias_of(whole))


def trainer(backbone, output, **changes):
    task = replace(toy_task(), backbone=backbone)
    own = dict(num_generations=2, max_completion_length=4, save_strategy="steps", save_steps=1)
    return toy_trainer(task, output, task.reward_model, **own | changes)


def test_a_bias_is_trained_beside_an_adapter_only_if_asked_and_the_best_one_is_restored(tmp_path):
    task = toy_task()
    vocab = task.backbone.vocab_size
    task.backbone.set_token_bias(torch.randn(vocab, generator=generator()), trainable=True)
    before = task.backbone.token_bias.detach().clone()
    trainer(task.backbone, tmp_path / "frozen").train()
    assert torch.equal(task.backbone.token_bias, before) and torch.equal(
        bias_of(tmp_path / "frozen" / "checkpoint-2"), before
    )
    trainer(task.backbone, tmp_path / "trained", train_bias=True).train()
    first, last = (bias_of(tmp_path / "trained" / f"checkpoint-{step}") for step in (1, 2))
    assert torch.equal(task.backbone.token_bias, last) and not torch.equal(first, last)
    task.backbone.restore(tmp_path / "trained" / "checkpoint-1")
    assert torch.equal(task.backbone.token_bias, first)


def test_a_bias_can_be_trained_without_an_adapter(tmp_path):
    backbone = Backbone(toy_task().backbone.peft.unload(), toy_task().backbone.tokenizer)
    with pytest.raises(InputError, match="a backbone without an adapter"):
        trainer(backbone, tmp_path)
    made = trainer(backbone, tmp_path, train_bias=True, target_kl=0.1)
    made.train()
    assert backbone.token_bias.abs().max() > 0 and made.backbone.trainable_parameters() == [backbone.token_bias]
    made.save_model(tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {BIAS_FILE, BASE_FILE, "README.md"}
    with pytest.raises(InputError, match="a policy of which nothing is trained"):
        trainer(backbone, tmp_path).train()


def policy_and_its_kl(trainable):
    backbone = perturb_adapter(make_backbone(perturb=False), scale=0.05)
    bias = 0.5 * torch.randn(VOCAB, dtype=torch.float64, generator=generator())
    backbone.set_token_bias(bias, trainable)
    ids, mask = torch.randint(3, VOCAB, (3, 6), generator=generator()), torch.ones(3, 6, dtype=torch.long)
    return backbone, bias, BatchKL(backbone, [(make_prompts(), ids, mask)])


@pytest.mark.parametrize("trainable", [False, True])
def test_what_is_trained_is_scaled_to_the_target(trainable):
    backbone, bias, batch = policy_and_its_kl(trainable)
    target = batch.start * (0.2 if trainable else 1.2)  # less than the bias's own KL, if that is trained
    landed = scale_adapter(backbone, batch, target / batch.start, 0.01)
    assert landed == pytest.approx(target, rel=0.01) and batch.measure() == pytest.approx(target, rel=0.01)
    assert torch.equal(backbone.token_bias, bias) != trainable


def test_beside_a_frozen_bias_an_adapter_comes_no_nearer_to_the_reference_than_the_bias_is():
    backbone, _, batch = policy_and_its_kl(trainable=False)
    start, wanted = batch.start, 0.1 * batch.start
    landed = scale_adapter(backbone, batch, 0.1, 0.01)
    assert wanted < landed < start and batch.measure() == pytest.approx(landed)


def test_a_server_is_refused_for_a_policy_with_a_bias():
    backbone = make_backbone()
    backbone.set_token_bias(torch.ones(VOCAB))
    sampler = StepSampler(SimpleNamespace(sampler="http://127.0.0.1:9"))
    with pytest.raises(InputError, match="none for a policy with a token bias"):
        sampler.sample(backbone, make_prompts(), generator(), 1)


# ---- merge ----
@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("llama, untied", "sequence_bias"), ("phi: head bias", "head"), ("cohere: logit scale", "sequence_bias"),
        ("gemma2: soft cap", "sequence_bias"),
    ],
)  # fmt: skip
def test_transformers_gives_a_merged_policys_log_probabilities(family, place, tmp_path):
    config, targets = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(tmp_path / "base")
    word_tokenizer([f"w{i}" for i in range(VOCAB)], "w0").save_pretrained(tmp_path / "base")
    lora = LoraSettings(r=2, alpha=4, target_modules=targets or ["q_proj", "v_proj"])
    backbone = perturb_adapter(Backbone.load(tmp_path / "base", lora=lora, attention="eager"))
    backbone.set_token_bias(torch.randn(VOCAB, generator=generator()))
    backbone.save_adapter(tmp_path / "adapter")
    assert merge(tmp_path / "adapter", tmp_path / "out").token_bias == place
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    prompts = make_prompts(1)
    with torch.no_grad():
        hidden = predicting_hidden(backbone, prompts, torch.zeros(1, 1, dtype=torch.long))
        want = backbone.head(hidden)[:, -1].log_softmax(-1)
        if place == "head":
            got = merged(prompts.ids).logits[:, -1].log_softmax(-1)
        else:
            out = merged.generate(prompts.ids, max_new_tokens=1, do_sample=False, output_scores=True,
                                  return_dict_in_generate=True)  # fmt: skip
            got = out.scores[0].log_softmax(-1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert (tmp_path / "out" / LOGIT_BIAS_FILE).is_file() == (place == "sequence_bias")


def test_a_heads_own_bias_lies_before_the_logits_scale():
    model = AutoModelForCausalLM.from_config(FAMILIES["phi: head bias"][0])
    model.config.logit_scale = 0.25
    before, values = model.lm_head.bias.detach().clone(), torch.randn(VOCAB)
    assert add_token_bias(model, values) == "head"
    torch.testing.assert_close(model.lm_head.bias.detach(), before + 4 * values)
