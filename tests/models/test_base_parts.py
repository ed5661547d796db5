"""A base and its adapter, one function at a time: what is loaded and from where, what is read of a configuration."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch
from conftest import EOS, make_backbone, make_prompts, tiny_config, tiny_gpt2
from field_table import table
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerFast
from transformers.utils import logging

from grade.errors import InputError
from grade.models import backbone as module
from grade.models import fingerprint as prints
from grade.models import folding
from grade.models.adapter import LoraSettings, _refuse_settings, _refuse_unknown
from grade.models.backbone import Backbone, _eos_of, _head_of, errors_only, load_pretrained
from grade.models.fingerprint import fingerprint, keep_fingerprint, same_base
from grade.models.folding import folded, lora_layers
from grade.models.parameters import flatten
from grade.models.watcher import WatchedCache


def words():
    from tokenizers import Tokenizer, models

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(23)}, unk_token="0"))
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


# ---- loading ----
def test_no_code_of_a_model_runs_where_transformers_has_its_own(stored, tmp_path):
    """Each file names code of its own beside a class that transformers knows: the latter is loaded."""
    for file in stored.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.Words", None]}
    for file in ("config.json", "tokenizer_config.json"):
        settings = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(settings | {"auto_map": names}))
    (tmp_path / "code.py").write_text("raise SystemExit('ran remote code')")
    model, tokenizer = load_pretrained(tmp_path, torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM" and len(tokenizer) == 23


@pytest.mark.parametrize(("asked", "used"), [("auto", "sdpa"), ("sdpa", "sdpa"), ("eager", "eager")])
def test_attention_is_the_models_own_or_what_is_asked_for(stored, asked, used):
    for attention in ([asked], []) if asked == "auto" else ([asked],):
        assert load_pretrained(stored, torch.float32, *attention)[0].config._attn_implementation == used
    assert Backbone.load(stored, attention=asked).model.config._attn_implementation == used


def test_a_base_is_loaded_in_float32_and_bare_unless_more_is_asked_for(stored):
    bare = Backbone.load(stored)
    assert (
        bare.dtype == torch.float32 and bare.peft is None and bare.device.type == "cpu" and bare.tokenizer is not None
    )
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert Backbone.load(str(stored), name).dtype == getattr(torch, name)
    with pytest.raises(InputError, match="dtype: got 'half'; allowed: float32, bfloat16, float16, float64"):
        Backbone.load(stored, "half")


def test_a_new_adapter_depends_on_its_seed_alone(stored):
    lora, config = LoraSettings(r=2), tiny_config()

    def parts(backbone):
        return flatten(p.detach() for p in backbone.trainable_parameters())

    torch.manual_seed(7)
    want, other = (parts(Backbone.load(stored, lora=lora, seed=seed)) for seed in (0, 1))
    later = Backbone(AutoModelForCausalLM.from_config(config))
    state = torch.get_rng_state()
    later.add_adapter(lora)
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(want, other)
    for made in (
        later,
        Backbone.load(stored, lora=lora),
        Backbone(AutoModelForCausalLM.from_config(config), None, lora),
    ):
        assert torch.equal(parts(made), want)
    made = Backbone(AutoModelForCausalLM.from_config(config), None, lora, seed=1)
    assert torch.equal(parts(made), other)


def test_an_encoder_decoder_and_an_error_of_many_lines_are_one_line(stored, tmp_path, monkeypatch):
    config = json.loads((stored / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"is_encoder_decoder": True}))
    with pytest.raises(InputError, match="not an encoder-decoder$"):
        load_pretrained(tmp_path, torch.float32)
    for text, shown in (("\nfirst\nsecond", "(first)"), (" ", "(KeyError)"), ("", "(KeyError)")):

        def fails(*_, text=text, **__):
            raise (ValueError if text.strip() else KeyError)(*([text] if text.strip() else []))

        monkeypatch.setattr(module.AutoConfig, "from_pretrained", fails)
        with pytest.raises(InputError) as caught:
            load_pretrained(stored, torch.float32)
        assert str(caught.value).endswith(f"no remote code {shown}")


def test_warnings_of_transformers_are_off_meanwhile():
    before = logging.get_verbosity()
    with pytest.raises(KeyError), errors_only():
        assert logging.get_verbosity() == logging.ERROR
        raise KeyError
    assert logging.get_verbosity() == before != logging.ERROR


def model_of(generation, config):
    made = SimpleNamespace(generation_config=generation, config=SimpleNamespace(eos_token_id=config))
    if generation is not None:
        made.generation_config = SimpleNamespace(eos_token_id=generation if generation != "none" else None)
    return made


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [(None, None, ()), (None, 0, (0,)), (None, [3, 4], (3, 4)), (5, 3, (5,)), ((0, 5), 3, (0, 5)), ("none", 3, (3,)),
     (0, 3, (0,)), ("none", None, ())],
)  # fmt: skip
def test_ends_of_sequence_are_those_of_generation_or_else_the_models(generation, config, eos):
    assert _eos_of(model_of(generation, config)) == eos


def headed(layer, **config):
    return SimpleNamespace(config=SimpleNamespace(**config), get_output_embeddings=lambda: layer)


def test_a_head_is_scaled_and_capped_as_its_model_says():
    layer = nn.Linear(2, 3)
    plain = _head_of(headed(layer))
    assert (plain.scale, plain.softcap, plain.temperature) == (1.0, None, 1.0)
    assert plain.weight is layer.weight and plain.bias is layer.bias
    assert _head_of(headed(nn.Linear(2, 3, bias=False))).bias is None
    assert _head_of(headed(nn.Embedding(2, 3))).bias is None
    assert _head_of(headed(layer, logits_scaling=8.0)).scale == 0.125
    assert _head_of(headed(layer, logit_scale=8)).scale == 8.0
    assert _head_of(headed(layer, logits_scaling=4.0, logit_scale=8.0)).scale == 0.25
    assert _head_of(headed(layer, logits_scaling=None, logit_scale=None)).scale == 1.0
    assert _head_of(headed(layer, final_logit_softcapping=30.0)).softcap == 30.0


# ---- a backbone ----
def test_what_a_backbone_says_of_its_base(backbone):
    assert (backbone.vocab_size, backbone.hidden_size, backbone.max_positions) == (23, 16, 64)
    assert (backbone.dtype, backbone.device.type, backbone.embedding_scale) == (torch.float64, "cpu", 1.0)
    assert backbone.eos_token_ids == tuple(EOS) and backbone.embedding_weight is backbone.embedding.weight
    for config in (SimpleNamespace(), SimpleNamespace(max_position_embeddings=None)):
        bare = SimpleNamespace(model=SimpleNamespace(config=config))
        assert Backbone.max_positions.fget(bare) == 2**31  # no limit


@pytest.mark.parametrize(("scales", "want"), [({}, 1.0), ({"embed_scale": 3}, 3.0),
                                              ({"scalar_embed_scale": 4, "embed_scale": 3}, 4.0)])  # fmt: skip
def test_an_embedding_is_scaled_as_its_layer_says(scales, want):
    scale = Backbone.embedding_scale.fget(SimpleNamespace(embedding=SimpleNamespace(**scales)))
    assert scale == want and isinstance(scale, float)


def test_one_pass_builds_no_cache(backbone):
    prompts, caches = make_prompts(), []
    handle = backbone.decoder.register_forward_hook(lambda *args: caches.append(args[-1].past_key_values))
    try:
        backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    finally:
        handle.remove()
    assert caches == [None]


def test_a_flag_is_anywhere_where_it_is_here_or_where_the_shards_say_so(backbone):
    assert backbone.anywhere(True) is True and backbone.anywhere(False) is False
    backbone.shards = SimpleNamespace(any=lambda flag: ("asked", flag))
    assert backbone.anywhere(False) == ("asked", False)


class Noted:
    def __init__(self):
        self.phases, self.tags = [], []

    @contextlib.contextmanager
    def during(self, phase):
        self.phases.append(phase)
        yield

    def tag(self, tensors, category):
        self.tags.append((category, len(list(tensors))))


def test_a_watcher_is_told_within_its_context_alone(backbone):
    prompts, watcher = make_prompts(), Noted()
    with pytest.raises(KeyError), backbone.watched_by(watcher):
        cache = backbone.new_cache()
        assert isinstance(cache, WatchedCache)
        backbone.decode(backbone.embed(prompts.ids), prompts.mask, cache)
        assert watcher.tags == [("kv cache", 2)] * 2  # keys and values of each layer
        with backbone.merged():
            assert watcher.tags[2:] == [("weights", 1)] * 8
        with backbone.watched_by(None):
            assert type(backbone.new_cache()) is DynamicCache
        assert type(backbone.new_cache()) is WatchedCache
        raise KeyError
    assert watcher.phases == ["rollout", "reference"]
    assert type(backbone.new_cache()) is DynamicCache
    with backbone.reference(), backbone.phase("loss"):
        pass
    assert watcher.phases == ["rollout", "reference"]


def test_the_adapter_is_off_within_reference_and_frozen(backbone):
    with backbone.reference():
        assert backbone.trainable_parameters() == []
    assert len(backbone.trainable_parameters()) == 16
    bare = Backbone(AutoModelForCausalLM.from_config(tiny_config()))
    with bare.reference(), bare.merged():
        assert bare.trainable_parameters() == []
    with pytest.raises(InputError, match="adapter: got None"):
        bare.save_adapter("nowhere")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_only_a_whole_base_of_full_precision_is_folded(dtype):
    backbone = make_backbone(dtype=dtype)
    weight = lora_layers(backbone.model)[0][1].get_base_layer().weight
    before = weight.clone()
    with backbone.merged():
        assert torch.equal(weight, before) is (dtype == torch.bfloat16)
    assert torch.equal(weight, before)
    backbone.shards = object()
    with backbone.merged():
        assert torch.equal(weight, before)


def test_recomputed_layers_are_in_training_mode_meanwhile_and_keep_their_input_alone(backbone):
    from grade.experiments.traced import saved_bytes

    prompts = make_prompts()
    embeds = backbone.embed(prompts.ids).requires_grad_()
    layers = list(backbone.decoder.layers)
    kept = []
    for enabled in (False, True):
        with backbone.checkpointed_layers(enabled):
            assert [layer.training for layer in layers] == [enabled] * 2
            assert [layer.gradient_checkpointing for layer in layers] == [enabled] * 2
            assert not backbone.decoder.embed_tokens.training and not layers[0].mlp.training
            kept.append(saved_bytes(lambda: backbone.hidden(embeds, prompts.mask), exclude=backbone.parameters()))
        assert not any(layer.training or layer.gradient_checkpointing for layer in layers)
    assert kept[1] < kept[0] / 2
    with pytest.raises(KeyError), backbone.checkpointed_layers(True):
        raise KeyError
    assert not any(layer.training or layer.gradient_checkpointing for layer in layers)


def test_a_recomputed_layer_needs_no_input_that_requires_a_gradient(backbone):
    prompts = make_prompts()
    embeds, grads = backbone.embed(prompts.ids), []
    for enabled in (False, True):
        with backbone.checkpointed_layers(enabled):
            hidden = backbone.hidden(embeds, prompts.mask)
        loss = hidden[prompts.mask.bool()].square().sum()
        grads.append(flatten(torch.autograd.grad(loss, backbone.trainable_parameters())))
    torch.testing.assert_close(*grads)


# ---- an adapter's settings ----
def test_settings_of_an_adapter():
    assert table(LoraSettings) == {
        "r": (16, ">= 1, <= 16384"), "alpha": (32, ">= 1"), "dropout": (0.0, ">= 0, <= 0"),
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None), ({"r": 16384}, None), ({"r": 16385}, "r: got 16385; allowed: a whole number from 1 to 16384"),
        ({"r": 0}, "r: got 0"), ({"r": 1.5}, "r: got 1.5"), ({"rank_pattern": {"a": 0}}, "r: got 0"),
        ({"rank_pattern": {"a": 1}}, None), ({"bias": None}, "bias: got None; allowed: 'none'"),
        ({"use_dora": 0}, None), ({"modules_to_save": []}, None), ({"modules_to_save": ["a"]}, "modules_to_save"),
        ({"layer_replication": [(0, 1)]}, "layer_replication: .*share their weights"), ({"lora_alpha": 7}, None),
        ({"init_lora_weights": "eva"}, None), ({"init_lora_weights": "loftq"}, "False, gaussian, orthogonal, eva"),
        ({"task_type": None}, None), ({"task_type": "SEQ_CLS"}, "task_type: got 'SEQ_CLS'; allowed: CAUSAL_LM"),
        ({"trainable_token_indices": [0]}, "share the embedding"), ({"lora_bias": True}, "plain LoRA only"),
    ],
)  # fmt: skip
def test_which_settings_are_plain_lora(changes, message):
    config = LoraConfig(r=2, target_modules=["a"], task_type="CAUSAL_LM")
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(InputError, match=f"adapter: .*{message}") if message else contextlib.nullcontext():
        _refuse_settings(config)


def test_settings_that_this_peft_does_not_know_may_be_off():
    config = LoraConfig()
    _refuse_unknown(config, {"r": 2, "a": None, "b": 0, "c": []})
    with pytest.raises(InputError, match="adapter: a: got 1; allowed: a setting that this version of PEFT knows"):
        _refuse_unknown(config, {"r": 2, "b": True, "a": 1})


@pytest.mark.parametrize("config", [LoraSettings(r=2, alpha=6), LoraConfig(r=2, lora_alpha=6, lora_dropout=0.5)])
def test_a_new_adapter_has_its_scale_no_dropout_and_a_product_of_zero(config):
    if isinstance(config, LoraConfig):
        config.target_modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    backbone = Backbone(AutoModelForCausalLM.from_config(tiny_config()), lora=config)
    layers = [layer for _, layer in lora_layers(backbone.model)]
    assert len(layers) == 8 and not any(m.training for m in backbone.model.modules())
    for layer in layers:
        assert layer.scaling["default"] == 3.0 and type(layer.lora_dropout["default"]) is nn.Identity
        assert not layer.lora_B["default"].weight.any() and layer.lora_A["default"].weight.any()
    assert backbone.peft.peft_config["default"].lora_dropout == 0.0
    assert not isinstance(config, LoraConfig) or config.lora_dropout == 0.5  # the caller's is as it was


# ---- fingerprints ----
def test_a_fingerprint_is_the_same_for_ever():
    """Folders on disk hold it; an adapter whose base is another one by it is refused."""
    layer = nn.Linear(9, 11)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(99.0).view(11, 9) / 7)
        layer.bias.copy_(torch.arange(11.0) / 3)
    want = {"shapes": "a5768490edf22e88", "bfloat16": "8b995f420499e131", "float16": "583493329ae543bb"}
    assert {name: text[:16] for name, text in fingerprint(layer).items()} == want
    assert {len(text) for text in fingerprint(layer).values()} == {64}


def test_a_fingerprint_can_be_kept():
    layer = nn.Linear(2, 2)
    keep_fingerprint(layer)
    kept = fingerprint(layer)
    with torch.no_grad():
        layer.weight.add_(1)
    assert fingerprint(layer) == kept
    fingerprint(layer).clear()  # a copy
    assert fingerprint(layer) == kept
    assert not same_base(kept, fingerprint(nn.Linear(2, 2)))


def test_empty_tensors_and_some_without_contents():
    class Parts(nn.Module):
        def __init__(self, **parts):
            super().__init__()
            for name, tensor in parts.items():
                setattr(self, name, nn.Parameter(tensor))

    empty = fingerprint(Parts(a=torch.zeros(0, 3)))
    assert set(empty) == {"shapes", "bfloat16", "float16"} and empty["shapes"] != fingerprint(Parts())["shapes"]
    assert empty["bfloat16"] == fingerprint(Parts())["bfloat16"]
    one = fingerprint(Parts(a=torch.zeros(0, 3), b=torch.ones(1)))
    assert one["bfloat16"] == fingerprint(Parts(b=torch.ones(1)))["bfloat16"] != empty["bfloat16"]
    assert fingerprint(Parts(a=torch.ones(1), b=torch.ones(1, device="meta"))) == {}
    assert set(fingerprint(Parts(a=torch.ones(1).half(), b=torch.ones(1)))) == {"shapes", "float16"}
    assert set(fingerprint(Parts(a=torch.ones(1).half(), b=torch.ones(1).bfloat16()))) == {"shapes"}
    mine = Parts(lora_A=torch.ones(1), b=torch.ones(1))
    assert fingerprint(nn.ModuleDict({"x": mine})) == fingerprint(nn.ModuleDict({"x": Parts(b=torch.ones(1))}))
    assert prints._name_in_base("a.base_layer.weight") == "a.weight"


# ---- folding ----
def test_a_folded_weight_is_the_weight_and_the_scaled_product(backbone):
    made = []
    layers = [layer for _, layer in lora_layers(backbone.model)]
    want = [
        layer.get_base_layer().weight
        + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        for layer in layers
    ]
    with folded(backbone.model, made.extend):
        for layer, weight in zip(layers, want, strict=True):
            torch.testing.assert_close(layer.get_base_layer().weight.detach(), weight.detach())
    assert [id(w) for w in made] == [id(layer.get_base_layer().weight) for layer in layers]


def refused(monkeypatch, share):
    """Whether the check refuses a policy that differs, when folded, by this share of the adapter's effect."""
    backbone = make_backbone()
    effect = {}
    forward = type(backbone.model).forward

    def changed(self, input_ids, attention_mask):
        result = forward(self, input_ids=input_ids, attention_mask=attention_mask)
        effect.setdefault("passes", []).append(result.logits.clone())
        if len(effect["passes"]) == 2:  # beside, then folded
            with torch.no_grad(), backbone.peft.disable_adapter():
                base = original()
            result.logits = result.logits + share * (effect["passes"][0] - base)
        return result

    def original():
        weights = [(layer.get_base_layer().weight, w) for (_, layer), w in zip(layers, kept, strict=True)]
        now = [weight.data for weight, _ in weights]
        for weight, value in weights:
            weight.data = value
        try:
            ids = torch.arange(1, 6).view(1, -1)
            return forward(backbone.model, input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        finally:
            for (weight, _), value in zip(weights, now, strict=True):
                weight.data = value

    layers = lora_layers(backbone.model)
    kept = [layer.get_base_layer().weight.data for _, layer in layers]
    monkeypatch.setattr(type(backbone.model), "forward", changed)
    try:
        return not folding._folds(backbone.peft, [layer for _, layer in layers])
    finally:
        monkeypatch.undo()


def test_folding_may_differ_by_a_tenth_of_the_adapters_effect(monkeypatch):
    assert [refused(monkeypatch, share) for share in (0.0, 0.09, 0.11, 1.0)] == [False, False, True, True]


def test_the_check_reads_five_tokens_and_noise_that_is_always_the_same(monkeypatch):
    backbone, seen, factors = make_backbone(), [], []
    forward = type(backbone.model).forward

    def noted(self, input_ids, attention_mask):
        seen.append((input_ids.tolist(), attention_mask.tolist()))
        factors.extend(p.detach().clone() for p in backbone.trainable_parameters()[:2])
        return forward(self, input_ids=input_ids, attention_mask=attention_mask)

    monkeypatch.setattr(type(backbone.model), "forward", noted)
    layers = lora_layers(backbone.model)
    assert folding._folds(backbone.peft, [layer for _, layer in layers])
    assert seen == [([[1, 2, 3, 4, 5]], [[1] * 5])] * 3
    source = torch.Generator().manual_seed(0)
    a = torch.randn(2, 16, generator=source).double() * 2**-0.5
    torch.testing.assert_close(factors[0], a)
    weight = layers[0][1].get_base_layer().weight
    size = 0.1 * weight.square().mean().sqrt() / 2  # the scale is 2
    torch.testing.assert_close(factors[1], torch.randn(16, 2, generator=source).double() * size)
    assert folding._folds(backbone.peft, []) is not True or True


def test_only_weights_that_are_folded_are_checked(monkeypatch):
    monkeypatch.setattr(folding, "_folds", lambda *_: pytest.fail("checked"))
    for weight in (torch.ones(1, device="meta"), torch.ones(1).bfloat16(), torch.ones(1).half()):
        model = SimpleNamespace(get_input_embeddings=lambda weight=weight: SimpleNamespace(weight=weight))
        folding.refuse_unfoldable(_Wrapped(model))
    with FakeTensorMode():
        weight = torch.ones(1)
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    folding.refuse_unfoldable(_Wrapped(model))


class _Wrapped(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def get_base_model(self):
        return self.base


def test_positions_may_be_adapted_and_folded():
    backbone = make_backbone(tiny_gpt2(), target_modules=["wpe", "c_attn"])
    layer = next(layer for name, layer in lora_layers(backbone.model) if name.endswith("wpe"))
    ((a, b, scale),) = folding._factors(layer)
    assert (a.shape, b.shape, scale) == ((2, 64), (16, 2), 2.0)
    want = layer.get_base_layer().weight + scale * (b @ a).T
    with folded(backbone.model):
        torch.testing.assert_close(layer.get_base_layer().weight.detach(), want.detach())
