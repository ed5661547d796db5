"""Models to trace: from a name to a backbone without data.

A name, a hub id or a ``config.json`` becomes a transformers configuration, from which a backbone is built on fake
tensors (to trace) or with random weights (to measure).

Memory depends on shapes and types only, never on the values of weights, so a configuration is all that is needed.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from grade.errors import InputError
from grade.memory.nodata import NoData
from grade.memory.shapes import SHAPES, ModelShape
from grade.models.adapter import LoraSettings
from grade.models.backbone import DTYPES, Backbone

Adapter = Literal["lora", "full"]
ALIASES = {"qwen2.5-coder-3b": "qwen2.5-3b", "qwen2.5-coder-7b": "qwen2.5-7b", "qwen2.5-coder-1.5b": "qwen2.5-1.5b"}
"""Other names of the shipped shapes, in lower case."""
CONTEXT = {"Qwen3-4B": 40_960, "Qwen2.5-1.5B": 32_768, "Qwen2.5-3B": 32_768, "Qwen2.5-7B": 32_768, "SmolLM2-135M": 8192}
"""``max_position_embeddings`` of the shipped shapes."""

TINY = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2)  # fmt: skip
"""The model ``tiny``: traced in a second, for tests and the notebooks' defaults."""


def model_config(name: str) -> PretrainedConfig:
    """The configuration of a shipped shape, a hub id, a folder or a ``config.json``.

    Args:
        name: For example ``qwen3-4b`` (upper or lower case), ``org/model``, ``models/backbone`` or ``x/config.json``.

    Returns:
        A transformers configuration of a decoder-only model.

    Raises:
        InputError: If it cannot be found or read, or lacks a size.
    """
    if name == "tiny":
        return LlamaConfig(**TINY)
    shapes = {shape.name.lower(): shape for shape in SHAPES.values()}
    short = name.lower().rpartition("/")[2].removesuffix("-instruct")
    shape = shapes.get(ALIASES.get(short, short))
    if shape is not None and not Path(name).exists():
        return shape_config(shape)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types, which mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else error.__class__.__name__
        allowed = f"{', '.join(sorted(shapes))}, a Hugging Face id, or a folder with config.json ({reason})"
        raise InputError("model", name, allowed) from None
    missing = [k for k in ("num_hidden_layers", "vocab_size", "hidden_size") if not getattr(config, k, None)]
    if missing or config.is_encoder_decoder:
        allowed = f"a decoder-only language model; config.json lacks {missing[0]}" if missing else "not encoder-decoder"
        raise InputError("model", name, allowed)
    return config


def shape_config(shape: ModelShape) -> PretrainedConfig:
    """The transformers configuration of a shipped shape.

    Args:
        shape: One of `grade.memory.shapes.SHAPES`.

    Returns:
        Its configuration; the model built from it has exactly ``parameter_count(shape)`` parameters.
    """
    sizes = dict(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied, max_position_embeddings=CONTEXT[shape.name],
    )  # fmt: skip
    if shape.qk_norm:
        return Qwen3Config(head_dim=shape.head_dim, **sizes)
    return Qwen2Config(**sizes) if shape.qkv_bias else LlamaConfig(head_dim=shape.head_dim, **sizes)


def shape_of(name: str) -> ModelShape:
    """The shape of a model, for the closed forms of `grade.memory.formulas`.

    Args:
        name: As in `model_config`.

    Returns:
        Its sizes, read from the configuration (Llama's family).

    Raises:
        InputError: As `model_config`, or if the configuration lacks a size.
    """
    config = model_config(name)
    try:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return ModelShape(
            name, config.num_hidden_layers, config.hidden_size, heads, config.num_key_value_heads, head_dim,
            config.intermediate_size, config.vocab_size, bool(config.tie_word_embeddings),
            qkv_bias=config.model_type == "qwen2", qk_norm=config.model_type == "qwen3",
        )  # fmt: skip
    except AttributeError as error:
        raise InputError("model", name, f"a model of Llama's family ({error})") from None


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A copy of a configuration with another number of layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    return config


def build_backbone(
    config: PretrainedConfig,
    dtype: str = "bfloat16",
    adapter: Adapter = "lora",
    lora: LoraSettings | None = None,
    attention: str = "sdpa",
    device: str | torch.device = "meta",
) -> Backbone:
    """A backbone from a configuration alone: random weights, no tokenizer.

    Args:
        config: The model.
        dtype: Type of the base.
        adapter: ``lora`` trains an adapter, ``full`` every weight of the layers (not the table and the head, which
            reward and reference share).
        lora: Settings of the adapter.
        attention: sdpa or eager.
        device: Where to put it; meta has no data.

    Returns:
        The backbone.

    Raises:
        InputError: If the model is not supported.
    """
    with torch.device(device), NoData() if str(device) == "meta" else contextlib.nullcontext():
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation=attention)
        except ValueError as error:
            raise InputError("model", config.model_type, f"a causal language model ({str(error)[:100]})") from None
        backbone = Backbone(model, None, (lora or LoraSettings()) if adapter == "lora" else None)
    if adapter == "full":
        tables = {id(backbone.head.weight), id(backbone.embedding_weight)}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) not in tables)
    return backbone


def to_fake(backbone: Backbone, mode: FakeTensorMode, *others: nn.Module) -> None:
    """Replace every parameter and buffer on ``meta`` by an empty fake CPU tensor, tied ones once.

    PEFT cannot be built inside a `FakeTensorMode`, and operators do not accept meta and fake tensors together.

    Args:
        backbone: On ``meta``; changed in place.
        mode: The mode that it will run in.
        others: More modules on ``meta``: a reward model.
    """
    made: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return made[id(tensor)]

    with mode:
        for module in (m for root in (backbone, *others) for m in root.modules()):
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    if tensor is not None:
                        store[name] = fake(tensor)
    layer = backbone.model.get_output_embeddings()
    backbone.head = replace(backbone.head, weight=layer.weight, bias=getattr(layer, "bias", None))
