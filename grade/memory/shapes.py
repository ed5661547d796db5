"""Sizes of the models that ship by name, from their published ``config.json`` (torchtune's and litgpt's agree).

Llama's family only: RMSNorm, gated MLP, grouped-query attention, no bias except on Qwen2.5's q, k and v.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    name: str  # hub name without the organisation
    layers: int
    hidden: int  # D, width of the residual stream
    heads: int  # of queries
    kv_heads: int
    head_dim: int  # heads * head_dim need not be D
    intermediate: int  # width of the gated MLP
    vocab: int  # V, rows of the embedding table (padding rows included)
    tied: bool  # whether the head is the embedding table
    context: int  # tokens that it can read
    qkv_bias: bool = False
    qk_norm: bool = False  # an RMSNorm over each head of queries and keys


QWEN3_4B = ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936, tied=True, context=40_960, qk_norm=True)
_QWEN25 = dict(head_dim=128, context=32_768, qkv_bias=True)
QWEN25_1_5B = ModelShape("Qwen2.5-1.5B", 28, 1536, 12, 2, intermediate=8960, vocab=151_936, tied=True, **_QWEN25)
QWEN25_3B = ModelShape("Qwen2.5-3B", 36, 2048, 16, 2, intermediate=11_008, vocab=151_936, tied=True, **_QWEN25)
QWEN25_7B = ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, intermediate=18_944, vocab=152_064, tied=False, **_QWEN25)
SMOLLM2_135M = ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49_152, tied=True, context=8192)

SHAPES = {shape.name.lower(): shape for shape in (QWEN3_4B, QWEN25_1_5B, QWEN25_3B, QWEN25_7B, SMOLLM2_135M)}
