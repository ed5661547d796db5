"""What a model must do to be accepted: each of these breaks one thing, and the line names it."""

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from conftest import make_prompts, tiny_config, tiny_gpt2
from models.test_zoo import build
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.backbone import Backbone, load_pretrained


def tiny(config=None, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or tiny_config(), dtype=dtype)


def change(module, function):
    """Let ``function(forward, *args, **kwargs)`` stand in for a module's forward."""
    forward = type(module).forward
    module.forward = MethodType(lambda self, *args, **kw: function(forward.__get__(self), *args, **kw), module)


def test_the_probe_changes_nothing():
    model = tiny()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    backbone = Backbone(model)
    assert not backbone.embed(torch.tensor([1])).requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m.training for m in model.modules())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def _alone(forward, *args, past_key_values=None, **kw):
    """Attention that decodes each token without those before."""
    hidden = kw.get("hidden_states", args[0] if args else None)
    if past_key_values is None or hidden.shape[1] > 1:
        return forward(*args, past_key_values=past_key_values, **kw)
    return forward(*args, past_key_values=None, **{**kw, "attention_mask": None})


def layer_changed(function):
    model = tiny()
    change(model.model.layers[0], function)
    return model


def noisy(forward, *args, **kw):
    """As a router's jitter: off in eval mode, on when the layer is recomputed."""
    out = forward(*args, **kw)
    return out * (1 + 0.1 * torch.rand_like(out)) if forward.__self__.training else out


def counts_padding():
    model = tiny(tiny_gpt2())
    change(model.transformer.wpe, lambda forward, ids: forward(torch.arange(ids.shape[1]).expand_as(ids)))
    return model


def forgets_its_cache():
    model = tiny()
    for layer in model.model.layers:
        change(layer.self_attn, _alone)
    return model


SPOILT = {
    "not finite beside padding": (lambda: build("gemma2", torch.float64), "differ by nan in float64"),
    "a function in place of a dropout module": (
        lambda: layer_changed(lambda forward, *args, **kw: F.dropout(forward(*args, **kw), 0.1)), "without dropout",
    ),
    "looks ahead": (
        lambda: layer_changed(lambda forward, x, *args, **kw: forward(x, *args, **kw) + x.mean(1, True)), "causal",
    ),
    "ignores the mask": (
        lambda: layer_changed(lambda forward, *args, **kw: forward(*args, **{**kw, "attention_mask": None})), "padding",
    ),
    "positions count padding": (counts_padding, "padding|cache"),
    "forgets its cache": (forgets_its_cache, "cache"),
    "changes its inputs in place": (
        lambda: layer_changed(lambda forward, x, *args, **kw: forward(x.mul_(1.5), *args, **kw)),
        "inputs_embeds as they are",
    ),
    "random in training mode alone": (lambda: layer_changed(noisy), "when its layers are recomputed"),
    "a finite root of 0 with an infinite slope": (
        lambda: layer_changed(lambda forward, x, *args, **kw: forward(x, *args, **kw) + (x * 0).sqrt()),
        "finite gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spoilt", "reason"), SPOILT.values(), ids=SPOILT)
def test_a_model_that_could_not_be_trained_exactly_is_refused(spoilt, reason):
    with pytest.raises(InputError, match=reason):
        Backbone(spoilt())


@pytest.mark.parametrize(
    ("cap", "dtype", "known"),
    [(30.0, torch.float32, True), (1000.0, torch.bfloat16, False)],
)  # fmt: skip
def test_a_soft_cap_that_the_head_does_not_know_is_refused_or_warned_of(cap, dtype, known):
    """The logits here are below 1, where a cap of 30 changes them by less than rounding."""
    model = tiny(tiny_config(initializer_range=0.02), dtype)
    forward = type(model).forward

    def capped(self, *args, **kw):
        result = forward(self, *args, **kw)
        result.logits = cap * torch.tanh(result.logits / cap)
        return result

    model.forward = MethodType(capped, model)
    with (
        pytest.raises(InputError, match="soft-capped")
        if known
        else pytest.warns(UserWarning, match="soft-capped.*much for rounding")
    ):
        Backbone(model)


@pytest.mark.parametrize(
    ("dtype", "noise"), [(torch.float64, 2e-3), (torch.float32, 2e-3), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)]
)
def test_rounding_of_any_processor_is_no_reason(dtype, noise, recwarn):
    """Two orders of one computation differ by this at the most: ten bits of a product in TF32, eight of bfloat16."""
    model, generator = tiny(dtype=dtype), torch.Generator().manual_seed(0)

    def rounded(forward, *args, **kw):
        out = forward(*args, **kw)
        return out * (1 + noise * torch.randn(out.shape[:-1] + (1,), generator=generator).to(out)).detach()

    change(model.model.norm, rounded)
    Backbone(model)
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_difference_is_a_warning_where_products_are_coarse(dtype):
    """Float32 counts as coarse where TF32 is allowed."""
    model, before = tiny(dtype=dtype), torch.get_float32_matmul_precision()
    for layer in model.model.layers:
        change(layer.self_attn, _alone)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.warns(UserWarning, match="much for rounding"):
            Backbone(model)
    finally:
        torch.set_float32_matmul_precision(before)


def test_layers_within_layers_are_recomputed_once():
    """Zamba's: the backward pass runs after the switch is off again, and must find the graph of the forward pass."""
    backbone = Backbone(build("zamba"))
    parameters = [p.requires_grad_(True) for p in backbone.decoder.layers.parameters()]
    prompts, grads = make_prompts(2), []
    for recompute in (False, True):
        with backbone.checkpointed_layers(recompute):
            hidden = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
        grads.append(torch.autograd.grad(hidden[:, 1:].square().sum(), parameters, allow_unused=True))
    for plain, recomputed in zip(*grads, strict=True):
        assert (plain is None) == (recomputed is None)
        if plain is not None:
            torch.testing.assert_close(recomputed, plain)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_weights_are_refused_and_not_random(tmp_path, name):
    tiny(tiny_config(tie_word_embeddings=False)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state[name]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=rf"lack \['{name}'\]"):
        load_pretrained(tmp_path, torch.float32)
