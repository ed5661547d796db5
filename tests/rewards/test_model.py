"""Reward models: one score for ids, soft tokens and padded input; frozen base; honest loading; training that learns."""

import contextlib

import pytest
import torch
from conftest import make_backbone, tiny_config, tiny_gpt2, word_tokenizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from grade.data.reviews import Review
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.rewards.fit import FitSettings, RewardConfig, evaluate_reward, train_reward
from grade.rewards.model import HeadSettings, RewardModel, load_reward

WORDS = "<pad> good fine great lovely bad poor awful dull the a film plot cast was it of and to in one scene".split()
CASES = [
    ("bag", HeadSettings(hidden=0)),
    ("bag", HeadSettings(hidden=5)),
    ("trunk", HeadSettings(hidden=8)),
]


def build(kind, settings, dtype=torch.float64, config=None, seed=0):
    """A reward model with weights of ordinary size, on a base whose adapter is on and not zero."""
    lora = {"target_modules": ["c_attn"]} if config is not None and config.model_type == "gpt2" else {}
    backbone = make_backbone(config, dtype, **lora)
    torch.manual_seed(seed)
    model = RewardModel(kind, backbone, settings)
    model.standardise(torch.randn(backbone.hidden_size) * 0.1, torch.rand(backbone.hidden_size) + 0.5)
    return model


def batch(vocab=23):
    """Three sequences with padding on the left, on the right and on both sides, and where each one's tokens are."""
    ids = torch.randint(1, vocab, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 0, 0]])
    return ids, mask, [slice(3, 9), slice(0, 5), slice(1, 7)]


@pytest.mark.parametrize(("kind", "settings"), CASES)
@pytest.mark.parametrize("config", [tiny_config, tiny_gpt2])
def test_padding_does_not_change_the_score(kind, settings, config):
    model = build(kind, settings, config=config())
    ids, mask, spans = batch()
    embeds = model.backbone.embed(ids)
    alone = [model(embeds[i : i + 1, s], mask[i : i + 1, s]) for i, s in enumerate(spans)]
    assert_close(model(embeds, mask), torch.cat(alone))
    # Whatever stands in the padding must not matter, however large.
    noise = torch.where(mask.bool()[..., None], embeds, 1e3 * torch.ones_like(embeds))
    assert_close(model(noise, mask.double()), torch.cat(alone))
    assert torch.cat(alone).std() > 1e-4  # the scores do differ


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_ids_and_one_hots_score_alike(kind, settings):
    model = build(kind, settings)
    ids, mask, _ = batch()
    one_hot = torch.nn.functional.one_hot(ids, 23).double() @ model.backbone.embedding_weight
    want = model.score_ids(ids, mask, batch_size=2)
    assert_close(model(one_hot, mask), want)
    assert_close(model.logits(one_hot, mask).sigmoid(), want)
    assert not want.requires_grad and want.shape == (3,)


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_gradient_by_embeddings_is_exact(kind, settings):
    model = build(kind, settings, config=tiny_gpt2()).requires_grad_(False)  # Llama's norms compute in float32
    ids, mask, spans = batch()
    embeds = model.backbone.embed(ids)[:, 1:6].detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda e: model(e, mask[:, 1:6]), embeds, fast_mode=True)
    (grad,) = torch.autograd.grad(model(embeds, mask[:, 1:6]).sum(), embeds)
    norms = grad.norm(dim=-1)
    assert (norms[mask[:, 1:6] == 0] == 0).all() and (norms[mask[:, 1:6] == 1] > 0).all()


def test_trunk_head_is_the_documents_head_by_hand():
    """P = sigmoid(w2 . tanh(W1 mean + b1) + b2) of the mean hidden state of the bare base."""
    model = build("trunk", HeadSettings(hidden=8))
    ids, _, _ = batch()
    mean = model.backbone.model.base_model(input_ids=ids).last_hidden_state.mean(1)  # adapter on
    with model.backbone.reference():
        bare = model.backbone.model.base_model(input_ids=ids).last_hidden_state.mean(1)
    assert (mean - bare).abs().max() > 1e-3
    first, last = model.head[1], model.head[-1]
    inner = torch.tanh(((bare - model.center) / model.spread) @ first.weight.T + first.bias)
    want = torch.sigmoid(inner @ last.weight[0] + last.bias)
    assert_close(model.score_ids(ids, torch.ones_like(ids)), want)


def test_bag_by_hand():
    model = build("bag", HeadSettings())
    a, b = model.backbone.embed(torch.tensor([5, 9]))
    pooled = ((a + b) / 2 - model.center) / model.spread
    want = torch.sigmoid(model.head[-1].weight[0] @ pooled + model.head[-1].bias)
    assert_close(model.score_ids(torch.tensor([[5, 9]]), torch.ones(1, 2)), want)


def test_an_empty_sequence_is_nan_and_not_a_score():
    model = build("bag", HeadSettings())
    ids, mask, _ = batch()
    mask[1] = 0
    assert torch.isnan(model.score_ids(ids, mask)).tolist() == [False, True, False]


# --- saving and loading


def bare(seed=0, words=WORDS, dtype=torch.float32, **changes):
    torch.manual_seed(seed)
    config = tiny_config(vocab_size=len(words), eos_token_id=0, bos_token_id=0, **changes)
    return Backbone(
        AutoModelForCausalLM.from_config(config, dtype=dtype), word_tokenizer(words, "<pad>", unk_token="<pad>")
    )


@pytest.mark.parametrize(("kind", "settings"), CASES)
def test_saved_and_loaded_scores_are_identical(tmp_path, kind, settings):
    backbone = bare()
    model = RewardModel(kind, backbone, FitSettings(**settings.model_dump(), lr=0.5))
    model.standardise(torch.linspace(-1, 1, backbone.hidden_size), torch.ones(backbone.hidden_size))
    model.save(tmp_path / "reward")
    assert sorted(p.name for p in (tmp_path / "reward").iterdir()) == ["reward.json", "reward.safetensors"]
    loaded = load_reward(tmp_path / "reward", backbone)
    ids, mask, _ = batch(len(WORDS))
    assert torch.equal(loaded.score_ids(ids, mask), model.score_ids(ids, mask))
    assert not any(p.requires_grad for p in loaded.parameters()) and not loaded.training
    half = bare(dtype=torch.bfloat16)  # the same base, rounded, is still the same base
    assert load_reward(tmp_path / "reward", half).score_ids(ids, mask).dtype == torch.float32


def other_base(part):
    """The same sizes and nearly the same norms, but another tokenizer, or weights in the embedding or in a layer."""
    if part == "tokenizer":
        return bare(words=[*WORDS[:-2], "scene", "one"])
    backbone = bare()
    with torch.no_grad():
        p = backbone.embedding.weight if part == "embedding" else backbone.model.model.layers[1].mlp.up_proj.weight
        p.copy_(p.flip(0))
    return backbone


@pytest.mark.parametrize(
    ("kind", "part", "fits"),
    [("bag", "embedding", False), ("bag", "layer", True), ("trunk", "embedding", False), ("trunk", "layer", False),
     ("bag", "tokenizer", False)],
)  # fmt: skip
def test_a_reward_fits_the_weights_that_it_reads(tmp_path, kind, part, fits):
    """A bag reads the embedding table, a trunk all layers."""
    RewardModel(kind, bare(), HeadSettings()).save(tmp_path)
    with contextlib.nullcontext() if fits else pytest.raises(InputError, match="of the base: .*trained on"):
        load_reward(tmp_path, other_base(part))


# --- training


def reviews(n, seed):
    """Reviews of 8-20 words; one in four words carries the sentiment."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for i in range(n):
        label = i % 2
        length = int(torch.randint(8, 21, (), generator=generator))
        picks = torch.randint(0, 1000, (length,), generator=generator).tolist()
        tone = WORDS[1:5] if label else WORDS[5:9]
        words = [tone[p % 4] if j % 4 == 0 else WORDS[9 + p % (len(WORDS) - 9)] for j, p in enumerate(picks)]
        out.append(Review(" ".join(words), label))
    return out


def config(seed=0, **changes):
    fit = dict(
        hidden=0, dropout=0.1, lr=0.02, weight_decay=0.01, epochs=15, patience=5, batch_size=16,
        min_tokens=4, max_tokens=12,
    )  # fmt: skip
    fit |= changes
    return RewardConfig.parse({"bag": fit, "trunk": fit, "eval_tokens": [4, 12], "seed": seed})


@pytest.mark.parametrize("kind", ["bag", "trunk"])
def test_training_learns_and_leaves_the_base_alone(kind):
    backbone = bare()
    before = [p.clone() for p in backbone.parameters()]
    state = torch.get_rng_state()
    model, report = train_reward(kind, config(), backbone, reviews(120, 0), reviews(40, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, backbone.parameters(), strict=True))
    test = evaluate_reward(model, reviews(100, 2), [4, 12])
    assert test["accuracy_12"] > 0.75  # 3 of 12 words carry the label; chance is 0.5 with a standard error of 0.05
    assert 1 <= report["best_epoch"] <= report["epochs"] <= 15
    assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["bag", "trunk"])
def test_same_seed_same_model_other_seed_another(kind):
    def run(seed):
        return train_reward(kind, config(seed, epochs=2), bare(), reviews(40, 0), reviews(10, 1))[0].head[-1].weight

    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))


def test_early_stopping_returns_the_best_epoch():
    """At a far too large rate the first epochs are the best: the returned weights must be those that were reported."""
    validation = reviews(40, 1)
    model, report = train_reward("bag", config(lr=3.0, patience=2), bare(), reviews(60, 0), validation)
    assert report["epochs"] == report["best_epoch"] + 2 < 15
    seen = evaluate_reward(model, validation, [4, 12])
    assert (seen["log_loss_4"] + seen["log_loss_12"]) / 2 == pytest.approx(report["validation_log_loss"], rel=1e-5)
    assert seen["accuracy_12"] == report["validation_accuracy"]
