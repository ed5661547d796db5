"""Byte and token counts in closed form, each exact for the tensors it names.

What a framework adds (saved activations of a layer, temporaries, the allocator) is counted by `grade.memory.tracker`.
"""

from __future__ import annotations

from grade.memory.shapes import ModelShape


def parameter_count(shape: ModelShape) -> int:
    """Number of parameters, a tied head counted once.

    ``V D`` (twice if untied) ``+ L (D q + 2 D kv + q D + 3 D I + 2 D [+ q + 2 kv] [+ 2 head_dim]) + D``, with
    ``q = heads * head_dim`` and ``kv = kv_heads * head_dim``: embedding, attention, MLP, two norms per layer, biases,
    query and key norms, and the final norm.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * shape.hidden * q + 2 * shape.hidden * kv
    attention += (q + 2 * kv) * shape.qkv_bias + 2 * shape.head_dim * shape.qk_norm
    layer = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return tables + shape.layers * layer + shape.hidden


def rows_bytes(batch: int, tokens: int, width: int, itemsize: int = 4) -> int:
    """Bytes of a ``[B, T, width]`` tensor: soft tokens or logits (width V), embeddings (width D)."""
    return batch * tokens * width * itemsize


def topk_bytes(batch: int, tokens: int, k: int, weight_itemsize: int = 4, index_itemsize: int = 8) -> int:
    """Bytes of top-k weights ``[B, T, K]`` with their indices ``[B, T, K]`` (``torch.topk`` gives int64)."""
    return batch * tokens * k * (weight_itemsize + index_itemsize)


def gathered_embedding_bytes(batch: int, tokens: int, k: int, hidden: int, itemsize: int = 2) -> int:
    """Bytes of the gathered embeddings ``[B, T, K, D]``; their product with the weights is as large again."""
    return batch * tokens * k * hidden * itemsize


def mixing_flops(batch: int, tokens: int, support: int, hidden: int) -> int:
    """Floating point operations of mixing ``support`` embeddings for each token: ``2 B T support D``."""
    return 2 * batch * tokens * support * hidden


def kv_cache_bytes_per_token(shape: ModelShape, itemsize: int = 2) -> int:
    """Bytes of keys and values of one token in all layers: ``2 L kv_heads head_dim itemsize``."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize


def token_forwards_uncached(prompt: int, new: int) -> int:
    """Tokens processed when each of ``new`` steps re-runs its whole prefix: ``sum_{t=0}^{new-1} (prompt + t)``."""
    return new * prompt + new * (new - 1) // 2


def token_forwards_cached(prompt: int, new: int) -> int:
    """Tokens processed with a KV cache, the last new token's among them: ``prompt + new``."""
    return prompt + new


def attention_scores_uncached(prompt: int, new: int) -> int:
    """Attention scores per head and layer of the re-running loop: ``sum_{n=prompt}^{prompt+new-1} n^2``."""
    return sum(n * n for n in range(prompt, prompt + new))


def weights_bytes(shape: ModelShape, copies: int = 1, itemsize: int = 2) -> int:
    """Bytes of the weights, ``copies`` times."""
    return copies * parameter_count(shape) * itemsize


def lora_parameters(shape: ModelShape, r: int = 16, every: bool = False) -> int:
    """Parameters of an adapter of rank ``r`` on q, k, v and o: ``L r ((D + q) + 2 (D + kv) + (q + D))``.

    With ``every`` also on gate, up and down: ``+ 3 L r (D + I)``.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 * (shape.hidden + shape.intermediate) if every else 0
    return shape.layers * r * (2 * (shape.hidden + q) + 2 * (shape.hidden + kv) + mlp)


def adamw_bytes(parameters: int, itemsize: int = 4) -> int:
    """Bytes of AdamW's two moments, in the parameters' own type, without the step counts."""
    return 2 * parameters * itemsize


def checkpoint_bytes(shape: ModelShape, batch: int, length: int, itemsize: int = 2) -> int:
    """Bytes of the layers' inputs, all that checkpointing keeps: ``L B n D itemsize``."""
    return shape.layers * rows_bytes(batch, length, shape.hidden, itemsize)


def scores_bytes(shape: ModelShape, batch: int, length: int, itemsize: int = 2) -> int:
    """Bytes of one layer's attention scores ``[B, heads, n, n]``, which fused attention never stores."""
    return batch * shape.heads * length * length * itemsize


def layer_activation_bytes(shape: ModelShape, batch: int, length: int, r: int = 16, itemsize: int = 2) -> dict:
    """Bytes by group that one layer keeps for backward: LoRA of rank ``r`` on q, k, v and o, CUDA attention, a mask.

    With ``N = B n`` tokens, ``q = heads * head_dim`` and s = ``itemsize``, in transformers' and PEFT's own code:

    - norms: two float32 copies of the input and a float32 factor per token, ``2 (4 N D + 4 N)``
    - adapter inputs: each float32 product of the adapter keeps a float32 copy of its own input, and its r outputs,
      ``4 (3 N D + N q) + 16 N r``
    - attention: q, the output, and k and v repeated for every query head, ``4 s N q``; the mask, ``s B n^2``, each
      layer's own; row statistics, ``4 B heads ceil32(n)``; two counters of 512 bytes
    - MLP: gate, its SiLU, and up, ``3 s N I``

    For a half-precision base without query and key norms, and n a multiple of 16 (CUDA pads other masks).
    """
    tokens, q = batch * length, shape.heads * shape.head_dim
    return {
        "norms": 2 * (4 * tokens * shape.hidden + 4 * tokens),
        "adapter inputs": 4 * (3 * tokens * shape.hidden + tokens * q) + 16 * tokens * r,
        "attention": 4 * itemsize * tokens * q + itemsize * batch * length**2
        + 4 * batch * shape.heads * -(-length // 32) * 32 + 2 * 512,
        "MLP": 3 * itemsize * tokens * shape.intermediate,
    }  # fmt: skip
