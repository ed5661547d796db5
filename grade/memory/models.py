"""Models to trace: from a name to a backbone with random weights, or without data.

Memory depends on shapes and types only, never on values, so a configuration is all that is needed.
"""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from grade.errors import InputError
from grade.memory.meta import NoData
from grade.memory.shapes import SHAPES
from grade.models.adapter import LoraSettings
from grade.models.backbone import DTYPES, Backbone
from grade.plugins import QUANTISE_ON_META, import_object

TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2)  # fmt: skip
"""The model ``tiny``: traced in a second, for tests and the notebooks' defaults."""


def model_config(name: str) -> PretrainedConfig:
    """The configuration of a shipped shape (upper or lower case), a hub id, or a folder with ``config.json``."""
    if name == "tiny":
        return LlamaConfig(**TINY)
    short = name.lower().rpartition("/")[2].removesuffix("-instruct").replace("qwen2.5-coder-", "qwen2.5-")
    if short in SHAPES and not Path(name).exists():
        return _shipped(short)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        allowed = f"{', '.join(sorted(SHAPES))}, a Hugging Face id, or a folder with config.json"
        raise InputError("model", name, allowed) from error


def _shipped(name: str) -> PretrainedConfig:
    shape = SHAPES[name]
    sizes = dict(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied, max_position_embeddings=shape.context,
    )  # fmt: skip
    if shape.qk_norm:
        return Qwen3Config(head_dim=shape.head_dim, **sizes)
    return Qwen2Config(**sizes) if shape.qkv_bias else LlamaConfig(head_dim=shape.head_dim, **sizes)


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy of a configuration with another number of layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if vars(config).get("layer_types"):  # where they are computed they have the new number already
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    return config


def build_backbone(
    config: PretrainedConfig, dtype: str = "bfloat16", adapter: str = "lora", lora: LoraSettings | None = None,
    attention: str = "sdpa", device: str | torch.device = "meta", train_bias: bool = False,
    quantization_config: dict | None = None,
) -> Backbone:  # fmt: skip
    """A backbone with random weights and no tokenizer; on meta without data.

    ``adapter``: ``lora``, or ``full`` to train every weight of the layers (not the table and the head, which reward and
    reference share); ``train_bias`` trains a token bias too; ``quantization_config`` is for meta.
    """
    with torch.device(device), NoData() if str(device) == "meta" else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
        if quantization_config:
            import_object(QUANTISE_ON_META)(model, quantization_config)
        backbone = Backbone(model, None, (lora or LoraSettings()) if adapter == "lora" else None)
        if train_bias:
            backbone.set_token_bias(torch.zeros(len(backbone.ref_head.weight)), True)
    if adapter == "full":
        tables = {id(backbone.head.weight), id(backbone.embedding_weight)}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) not in tables)
    return backbone
