"""What the toy task is made of: notebooks, README and tests show its numbers."""

from types import SimpleNamespace

import pytest
import torch

from grade.data import tiny_lm
from grade.models.adapter import LoraSettings
from grade.training import toy


@pytest.fixture
def parts(monkeypatch):
    """What the toy's parts are called with; the policy's base is made, nothing is trained."""
    seen, make = {}, toy.tiny_model

    def tiny_model(config, texts):
        seen.update(base=config, texts=texts)
        return make(config, texts)

    def train_reward(kind, config, backbone, train, validation):
        seen.update(kind=kind, train=train, validation=validation)
        return "reward", None

    monkeypatch.setattr(toy, "tiny_model", tiny_model)
    monkeypatch.setattr(toy, "train_reward", train_reward)
    monkeypatch.setattr(toy.GoldJudge, "fit", lambda texts, labels: seen.update(judge=(texts, labels)) or "judge")
    return seen


def test_which_reviews_are_for_what(parts):
    task, reviews = toy.toy_task(seed=3, kind="trunk"), toy.toy_reviews(400, 3)
    assert parts["texts"] == [review.text for review in reviews] and parts["kind"] == "trunk"
    assert parts["train"] == reviews[:200] and parts["validation"] == reviews[200:280]
    assert parts["judge"] == ([r.text for r in reviews[280:]], [r.label for r in reviews[280:]])
    base = parts["base"]
    assert (base.source, base.vocab_size, base.hidden_size, base.layers, base.seed) == ("tiny", 300, 32, 2, 3)
    assert (task.reward_model, task.judge) == ("reward", "judge")
    assert len(task.train_prompts) == len(task.validation_prompts) == 200
    assert all(review.text.startswith(prompt) for review, prompt in zip(reviews, task.train_prompts, strict=False))
    config = task.backbone.peft.peft_config["default"]
    assert (config.r, config.lora_alpha, task.backbone.dtype) == (4, 8, torch.float32)


def test_seed_kind_and_type_by_default(parts):
    task = toy.toy_task()
    assert parts["base"].seed == 0 and parts["kind"] == "bag" and task.backbone.dtype == torch.float32
    wide = toy.toy_task(dtype="float64", lora=LoraSettings(r=2, alpha=3)).backbone
    assert wide.dtype == torch.float64 and wide.peft.peft_config["default"].r == 2


def test_a_toy_that_writes_is_larger_and_was_trained(monkeypatch):
    seen = {}
    monkeypatch.setattr(toy, "train_tokenizer", lambda texts, size: seen.update(tokenizer=(texts, size)) or range(7))
    monkeypatch.setattr(tiny_lm, "new_model", lambda config, size: seen.update(config=config, size=size) or "model")
    monkeypatch.setattr(tiny_lm, "text_windows", lambda tokenizer, texts, context: (tokenizer, texts, context))
    monkeypatch.setattr(tiny_lm, "fit", lambda model, config, windows, log: seen.update(fit=(model, windows)) or log(1))
    assert toy._writer(["a", "b"], 9, 4) == ("model", range(7))
    config = seen["config"]
    assert seen["tokenizer"] == (["a", "b"], 500) and seen["size"] == 7
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.layers) == (500, 64, 128, 2)
    assert (config.context, config.steps, config.warmup_steps, config.seed) == (32, 9, 10, 4)
    assert seen["fit"] == ("model", (range(7), ["a", "b"], 32))


def test_only_a_toy_that_is_asked_to_writes(parts, monkeypatch):
    asked = []

    def writer(texts, steps, seed):
        asked.append((len(texts), steps, seed))
        return toy.tiny_model(SimpleNamespace(**vars(config)), texts)

    toy.toy_task()
    config = parts["base"]
    assert asked == []
    monkeypatch.setattr(toy, "_writer", writer)
    toy.toy_task(seed=2, pretrain_steps=5)
    assert asked == [(400, 5, 2)]
