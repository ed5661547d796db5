"""Shapes of the models in the source documents, and their exact parameter counts.

The sizes are those of the published ``config.json`` files (torchtune's and litgpt's builders agree). Only the
Llama-like family is covered: RMSNorm, gated MLP, grouped-query attention, no bias except on Qwen2.5's q, k and v.
LoRA parameters are not part of a shape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer.

    Attributes:
        name: Hub name without the organisation.
        layers: Number of decoder layers.
        hidden: D, width of the residual stream.
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Width of a head; ``heads * head_dim`` need not be ``hidden``.
        intermediate: Width of the gated MLP.
        vocab: V, rows of the embedding table (padding rows included).
        tied: Whether the head is the embedding table.
        qkv_bias: Whether q, k and v have a bias.
        qk_norm: Whether queries and keys pass an RMSNorm over the head.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False


QWEN3_4B = ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151_936, tied=True, qk_norm=True)
QWEN25_1_5B = ModelShape("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151_936, tied=True, qkv_bias=True)
QWEN25_3B = ModelShape("Qwen2.5-3B", 36, 2048, 16, 2, 128, 11_008, 151_936, tied=True, qkv_bias=True)
QWEN25_7B = ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18_944, 152_064, tied=False, qkv_bias=True)
SMOLLM2_135M = ModelShape("SmolLM2-135M", 30, 576, 9, 3, 64, 1536, 49_152, tied=True)

SHAPES = {shape.name: shape for shape in (QWEN3_4B, QWEN25_1_5B, QWEN25_3B, QWEN25_7B, SMOLLM2_135M)}


def parameter_count(shape: ModelShape) -> int:
    """Number of parameters, a tied head counted once.

    ``V D`` (twice if untied) ``+ L (D q + 2 D kv + q D + 3 D I + 2 D [+ q + 2 kv] [+ 2 head_dim]) + D``, with
    ``q = heads * head_dim`` and ``kv = kv_heads * head_dim``: embedding, attention, MLP, two norms per layer, biases,
    query and key norms, and the final norm.

    Args:
        shape: The model.

    Returns:
        The count.

    >>> parameter_count(SMOLLM2_135M), parameter_count(QWEN3_4B)
    (134515008, 4022468096)
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * shape.hidden * q + 2 * shape.hidden * kv
    attention += (q + 2 * kv) * shape.qkv_bias + 2 * shape.head_dim * shape.qk_norm
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return tables + shape.layers * layer + shape.hidden
