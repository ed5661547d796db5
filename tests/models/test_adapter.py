"""Saved, new and continued adapters: plain LoRA is exact in every role, anything else is refused by name."""

import json

import pytest
import torch
from conftest import VOCAB, make_prompts, perturb_adapter, tiny_config, tiny_gpt2
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from grade.errors import InputError
from grade.models.adapter import BASE_FILE, LoraSettings, restore_adapter
from grade.models.backbone import Backbone
from grade.models.prompts import position_ids
from grade.models.sampling import generate

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
UNTIED = {"tie_word_embeddings": False}
EXPERTS = MixtralConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, num_local_experts=4, eos_token_id=2, initializer_range=0.3,
)  # fmt: skip


def base(config=None, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config or tiny_config(), dtype=dtype)


def lora(**changes):
    return LoraConfig(
        **{"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes
    )


def noisy(peft, seed=0):
    """Every trainable parameter changed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in peft.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn(p.shape, generator=generator).to(p))
    return peft


def saved(folder, config=None, dtype=torch.float64, **changes):
    """An adapter as plain PEFT saves it."""
    noisy(get_peft_model(base(config, dtype=dtype), lora(**changes))).save_pretrained(folder)
    return folder


@torch.no_grad()
def logits(backbone):
    prompts = make_prompts()
    return backbone.head(backbone.hidden(backbone.embed(prompts.ids), prompts.mask))[prompts.mask.bool()]


# GPT-2 keeps float64 throughout; Llama rounds to float32 in its norms.
GPT2 = {"target_modules": ["c_attn", "c_proj"]}
PLAIN = {
    "default": GPT2,
    "rank-stabilised": GPT2 | {"use_rslora": True},
    "patterns": GPT2 | {"rank_pattern": {"c_proj": 3}, "alpha_pattern": {"c_attn": 7}},
    "dropout": GPT2 | {"lora_dropout": 0.5},
    "some layers": GPT2 | {"layers_to_transform": [1], "layers_pattern": "h"},
    "no zeros at the start": GPT2 | {"init_lora_weights": False},
}


@pytest.mark.parametrize("how", ["folder", "new", "continued"])
@pytest.mark.parametrize("changes", PLAIN.values(), ids=PLAIN)
def test_plain_lora_samples_what_it_trains_and_leaves_the_base_alone(tmp_path, changes, how):
    model = base(tiny_gpt2())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = logits(Backbone(base(tiny_gpt2())))
    if how == "folder":
        backbone = Backbone(model, adapter=saved(tmp_path, tiny_gpt2(), **changes))
        peft, prompts = PeftModel.from_pretrained(base(tiny_gpt2()), tmp_path).eval(), make_prompts()
        places = position_ids(prompts.mask)
        with torch.no_grad():
            want = peft(input_ids=prompts.ids, attention_mask=prompts.mask, position_ids=places).logits
        torch.testing.assert_close(logits(backbone), want[prompts.mask.bool()], rtol=0, atol=1e-10)
    elif how == "new":
        backbone = Backbone(model, lora=lora(**changes))
        noisy(backbone.peft)
    else:
        backbone = Backbone(noisy(get_peft_model(model, lora(**changes))))
    backbone.peft.train()  # a Trainer of the user's may have done so
    policy = logits(backbone)
    assert torch.equal(logits(backbone), policy)  # nothing is dropped
    with backbone.merged():
        inside = logits(backbone)
    generate(backbone, make_prompts(), 4, torch.Generator().manual_seed(0))
    # 1e-10: rounding of float64 is 1e-15 here, a setting that is left out 1e-1.
    torch.testing.assert_close(inside, policy, rtol=0, atol=1e-10)
    with backbone.reference():
        assert torch.equal(logits(backbone), reference)
    assert (policy - reference).abs().max() > 1e-3 and torch.equal(logits(backbone), policy)
    after = {name.replace(".base_layer.", "."): value for name, value in backbone.model.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


REFUSED = {
    "DoRA": ({"use_dora": True}, "lora_magnitude_vector"),
    "modules_to_save": ({"modules_to_save": ["k_proj"]}, "modules_to_save"),
    "lora_bias": ({"lora_bias": True}, r"lora_B.*bias"),
    "bias all": ({"bias": "all"}, "bias.*the reference"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "init_lora_weights: got 'pissa'.*the reference"),
    "tokens": ({"trainable_token_indices": [3, 4]}, "token_adapter"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts"),
    "head": ({"target_modules": ".*(q_proj|lm_head)"}, "lm_head"),
    "embedding": ({"target_modules": ".*(q_proj|embed_tokens)"}, "embed_tokens"),
}


@pytest.mark.parametrize("how", ["folder", "new", "continued"])
@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_change_the_reference_or_not_be_sampled_is_refused(tmp_path, changes, message, how):
    if how == "continued" and "bias" in changes:
        return  # a continued model's biases are frozen with its base
    config = EXPERTS if message == "experts" else tiny_config(attention_bias="bias" in changes, **UNTIED)
    with pytest.raises(InputError, match=message):
        if how == "folder":
            Backbone(base(config, dtype=torch.float32), adapter=saved(tmp_path, config, torch.float32, **changes))
        elif how == "new":
            Backbone(base(config, dtype=torch.float32), lora=lora(**changes))
        else:
            Backbone(get_peft_model(base(config, dtype=torch.float32), lora(**changes)))


def test_the_default_layers_are_all_linear_ones_of_a_base_that_lacks_one_of_them():
    for config, layers in (
        (tiny_gpt2(), ["c_attn", "c_fc", "c_proj"]),
        (tiny_config(), ["k_proj", "o_proj", "q_proj", "v_proj"]),
    ):
        names = Backbone(base(config), lora=LoraSettings(r=2)).peft.active_peft_config.target_modules
        assert sorted({name.rpartition(".")[2] for name in names}) == layers


def shared():
    """Folding the adapter of one layer would change the other."""
    model = base()
    first, second = model.model.layers
    second.self_attn.q_proj.weight = first.self_attn.q_proj.weight
    return model


def merged():
    peft = get_peft_model(base(), lora())
    peft.merge_adapter()
    return peft


class ReadsWeights(LlamaMLP):
    """Uses a layer's weight without calling it, as absorbed projections do: a pass leaves its adapter out."""

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * F.linear(x, self.up_proj.weight))


def reader():
    model = base()
    for layer in model.model.layers:
        layer.mlp.__class__ = ReadsWeights
    return model


BASES = {  # with layers of an adapter of its own nothing would switch them off: the reference would be the policy
    "shared weights": (shared, lora(layers_to_transform=[0]), "sampling would differ from training"),
    "adapter layers": (lambda: get_peft_model(base(), lora()).get_base_model(), None, "a base without adapter layers"),
    "merged": (merged, None, "merged into .*q_proj.*unmerge_adapter"),
    "read elsewhere": (reader, lora(target_modules=["v_proj", "up_proj"]), "up_proj.* layers that the model calls"),
}


@pytest.mark.parametrize(("make", "settings", "message"), BASES.values(), ids=BASES)
def test_a_base_whose_samples_or_reference_would_be_wrong_is_refused(make, settings, message):
    with pytest.raises(InputError, match=message):
        Backbone(make(), lora=settings)


# --- the base's fingerprint


def trained(folder, model=None):
    backbone = perturb_adapter(Backbone(model or base(), lora=lora()))
    backbone.save_adapter(folder)
    return backbone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_an_adapter_goes_back_on_its_base_in_any_type_and_on_no_other(tmp_path, dtype):
    trained(tmp_path, base(dtype=torch.float32))
    model = base(dtype=torch.float32).to(dtype)
    assert Backbone(model, adapter=tmp_path).peft is not None

    with pytest.raises(InputError, match="an adapter of LlamaForCausalLM: it was trained on a base with other weights"):
        Backbone(base(seed=1).to(dtype), adapter=tmp_path)


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("names", "message"), [([FIRST], f"{FIRST}: nothing in the file"), ([], "extra: .* in the file, nothing")]
)
def test_an_adapter_that_peft_would_load_in_part_is_refused(tmp_path, names, message):
    backbone = trained(tmp_path)
    restore_adapter(backbone.peft, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS) | ({} if names else {"extra": torch.ones(1)})
    save_file({name: value for name, value in tensors.items() if name not in names}, tmp_path / WEIGHTS)
    for load in (lambda: Backbone(base(), adapter=tmp_path), lambda: restore_adapter(backbone.peft, tmp_path)):
        with pytest.raises(InputError, match=message):
            load()


def test_an_adapter_of_another_scale_is_not_restored(tmp_path):
    backbone = trained(tmp_path)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"lora_alpha": 3}))
    with pytest.raises(InputError, match="lora_alpha: got 3; allowed: 5, as the policy's"):
        restore_adapter(backbone.peft, tmp_path)


def test_a_saved_adapter_has_the_same_bytes_in_every_process(tmp_path):
    """PEFT keeps sets, whose order depends on the process's hash seed: they are sorted."""
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    Backbone(base(), lora=lora(target_modules=names, exclude_modules=["gate_proj", "zz", "yy"])).save_adapter(tmp_path)
    Backbone(base(), adapter=tmp_path).save_adapter(tmp_path / "again")
    Backbone(PeftModel.from_pretrained(base(), tmp_path)).save_adapter(tmp_path / "continued")
    for folder in (tmp_path, tmp_path / "again", tmp_path / "continued"):
        settings = json.loads((folder / SETTINGS).read_text())
        assert settings["target_modules"] == sorted(names)
        assert settings["exclude_modules"] == ["gate_proj", "yy", "zz"]
        for name in (WEIGHTS, BASE_FILE):
            assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def weights(backbone):
    return {name: value.clone() for name, value in backbone.model.state_dict().items()}


def test_weights_come_back_bit_by_bit_also_when_something_fails(backbone):
    before, modules = weights(backbone), list(backbone.model.named_modules())
    with pytest.raises(KeyError), backbone.merged():
        changed = weights(backbone)
        assert not any(isinstance(module, LoraLayer) for module in backbone.model.modules())
        raise KeyError
    assert not all(torch.equal(changed[name.replace(".base_layer", "")], value)
                   for name, value in before.items() if ".lora_" not in name)  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in weights(backbone).items())
    assert list(backbone.model.named_modules()) == modules
