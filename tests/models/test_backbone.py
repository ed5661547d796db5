"""One base in three roles, for several families of models."""

import pytest
import torch
from conftest import VOCAB, make_backbone, make_prompts, tiny_config, tiny_gpt2, word_tokenizer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    Qwen3Config,
)

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import replay
from grade.gradients.rollout import sample
from grade.gradients.unrolled import unrolled
from grade.models.backbone import Backbone
from grade.models.sampling import generate

COMMON = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
)  # fmt: skip
OPT = dict(
    vocab_size=VOCAB, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, word_embed_proj_dim=16, init_std=0.3, eos_token_id=2,
)  # fmt: skip
GROUPED = dict(COMMON, num_key_value_heads=2, head_dim=8)
FAMILIES = {
    "llama, tied": (tiny_config(), None),
    "llama, untied": (tiny_config(tie_word_embeddings=False), None),
    "qwen3": (Qwen3Config(**GROUPED), None),
    "gpt2: absolute positions": (tiny_gpt2(), ["c_attn"]),
    "opt: offset positions": (
        OPTConfig(**OPT), None),
    "gpt-neox": (GPTNeoXConfig(**COMMON), ["query_key_value"]),
    "phi: head bias": (PhiConfig(**COMMON), ["q_proj", "v_proj"]),
    "cohere: logit scale": (CohereConfig(**dict(COMMON, logit_scale=0.3)), None),
    "granite: embedding and logit scales": (
        GraniteConfig(**GROUPED, embedding_multiplier=3.0, logits_scaling=2.0), None),
    "gemma2: soft cap": (
        Gemma2Config(**GROUPED, final_logit_softcapping=3.0, query_pre_attn_scalar=8), None),
    "gemma3: scaled embedding": (Gemma3TextConfig(**GROUPED, query_pre_attn_scalar=8), None),
}  # fmt: skip


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request):
    config, targets = request.param
    targets = targets or (["q_proj", "v_proj"] if "OPT" in type(config).__name__ else None)
    # Gemma 2's eager attention casts its mask to float32 and so gives NaN at left padding of a float64 model.
    dtype = torch.float32 if "Gemma2" in type(config).__name__ else torch.float64
    return make_backbone(config, dtype, target_modules=targets or ["q_proj", "k_proj", "v_proj", "o_proj"])


def test_replay_equals_the_unrolled_graph(family):
    prompts, config = make_prompts(2), RelaxationConfig(estimator="gumbel", gumbel_topk=5, max_new_tokens=4)

    def reward(embeds, mask):
        return (embeds.tanh().mean(-1) * mask).sum(1)

    grads = []
    for engine in (unrolled, replay):
        family.zero_grad(set_to_none=True)
        extra = {"hops": 4} if engine is replay else {}
        engine(family, prompts, Objective(reward, 0.2), config, torch.Generator().manual_seed(1), **extra)
        grads.append(torch.cat([p.grad.flatten() for p in family.trainable_parameters()]))
    bound = 1e-6 if family.dtype == torch.float64 else 1e-4  # float32 rounding, amplified by the soft feedback
    assert (grads[1] - grads[0]).norm() <= bound * grads[0].norm()


@pytest.mark.parametrize("config", [
    tiny_gpt2(resid_pdrop=0.5, attn_pdrop=0.5), GPTNeoXConfig(**COMMON, hidden_dropout=0.5, attention_dropout=0.5),
    MixtralConfig(**GROUPED, num_local_experts=4, router_jitter_noise=0.5, attention_dropout=0.5),
    FalconConfig(**COMMON, hidden_dropout=0.5, attention_dropout=0.5),  # whose layers read the configuration's rates
    OPTConfig(**OPT | dict(layerdrop=0.9, dropout=0.5, attention_dropout=0.5)),  # whose decoder drops layers
], ids=lambda config: config.model_type)  # fmt: skip
def test_a_base_that_was_put_into_training_mode_has_neither_dropout_nor_a_routers_noise(config):
    backbone = make_backbone(config, **{"target_modules": ["q_proj"]} if config.model_type == "opt" else {})
    embeds, mask = torch.randn(2, 6, backbone.hidden_size, dtype=backbone.dtype), torch.ones(2, 6, dtype=torch.long)
    want = backbone.hidden(embeds, mask)
    for checkpointed in (False, True):
        backbone.peft.train()
        with backbone.checkpointed_layers(checkpointed):
            assert any(module.training for module in backbone.model.modules()) or not checkpointed
            torch.testing.assert_close(backbone.hidden(embeds, mask), want)


def test_soft_one_hot_embedding_is_the_tokens_own(family):
    """`e = scale * sum_j y_j E[I_j]` with one-hot y is what the model's first layer gets for the token."""
    rollout = sample(
        family, make_prompts(2), RelaxationConfig(estimator="gumbel", tau=1e-4, gumbel_topk=4, max_new_tokens=3),
        torch.Generator().manual_seed(0),
    )  # fmt: skip
    torch.testing.assert_close(rollout.embeds, family.embed(rollout.completion_ids))


@pytest.fixture
def saved(tmp_path):
    """A model on disk, with a tokenizer."""
    words = word_tokenizer([f"w{i}" for i in range(VOCAB)], "w3", eos_token="w2")
    words.save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config()).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def pickle(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def point_to_code(folder):
    config = (folder / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "mine"')
    (folder / "config.json").write_text(config.replace("{", '{"auto_map": {"AutoConfig": "code.Mine"},', 1))
    (folder / "code.py").write_text("raise SystemExit('ran remote code')")


@pytest.mark.parametrize(("change", "message"), [(pickle, "safetensors"), (point_to_code, "trust_remote_code")])
def test_nothing_pickled_and_no_code_of_a_model_is_loaded(saved, change, message):
    change(saved)
    with pytest.raises((OSError, ValueError), match=message):
        Backbone.load(saved)


def test_a_context_ends_where_longrope_turns_positions_anew():
    factors = dict(short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    rope = dict(rope_type="longrope", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, **factors)
    policy = Backbone(AutoModelForCausalLM.from_config(Qwen3Config(**GROUPED, rope_parameters=rope)), None)
    assert policy.max_positions == 16 and make_backbone().max_positions == 64
    generate(policy, make_prompts(2, 10), 6, torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="tokens of a prompt and its completion: got 17; allowed: at most 16"):
        generate(policy, make_prompts(2, 10), 7, torch.Generator().manual_seed(0))
