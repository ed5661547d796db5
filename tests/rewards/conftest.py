"""A tiny policy with a tokenizer, and tiny random classifiers that share its vocabulary."""

import pytest
import torch
from conftest import perturb_adapter
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
)

from grade.data.tiny_lm import train_tokenizer
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, padded

TEXTS = ["The film was a delight.", "This movie was dull and clumsy.", "The second half was great fun, not a mess."]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="session")
def tokenizer():
    made = train_tokenizer(TEXTS, 300)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def make_policy(tokenizer):
    def make(dtype=torch.float32, vocab_size=None):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=vocab_size or len(tokenizer), n_embd=16, n_layer=2, n_head=4, n_positions=64, eos_token_id=0,
            bos_token_id=None, pad_token_id=1, initializer_range=0.3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        backbone = Backbone(
            AutoModelForCausalLM.from_config(config, dtype=dtype), tokenizer,
            LoraSettings(r=2, alpha=4, target_modules=["c_attn"]),
        )  # fmt: skip
        return perturb_adapter(backbone, seed=1)

    return make


@pytest.fixture
def policy(make_policy):
    return make_policy()


@pytest.fixture
def make_classifier(tokenizer):
    """A random classifier; its dropout is on in the configuration, to see that it is off in use."""

    def make(kind, labels=1, dtype=torch.float64, vocab_size=None, **changes):
        torch.manual_seed(3)
        common = dict(vocab_size=vocab_size or len(tokenizer), num_labels=labels, initializer_range=0.3)
        sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
        made, of_kind = {
            "bert": (BertConfig, dict(max_position_embeddings=64, pad_token_id=1, **sizes)),
            "roberta": (RobertaConfig, dict(max_position_embeddings=66, pad_token_id=1, **sizes)),
            "llama": (LlamaConfig, dict(max_position_embeddings=64, eos_token_id=0, bos_token_id=None, **sizes)),
            "gpt2": (GPT2Config, dict(n_positions=64, n_embd=24, n_layer=2, n_head=4, eos_token_id=0)),
        }[kind]
        config = made(**{**common, **of_kind, **changes})
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)

    return make


@pytest.fixture
def batch(tokenizer):
    """Three prompts and completions, all of different lengths."""
    prompts = tokenizer(["The film was", "This movie", "The second half of it was not"])["input_ids"]
    completions = tokenizer([" a delight.", " was dull and clumsy, a mess", " fun"])["input_ids"]
    return PromptBatch(*padded(prompts, 1, "left")), *padded(completions, 1)
