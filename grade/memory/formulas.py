"""Byte and token counts in closed form.

Each is exact for the tensors it names. What a framework adds (saved activations of a layer, temporaries, the
allocator) is measured by `grade.memory.tracker`.
"""

from __future__ import annotations

from grade.memory.shapes import ModelShape, parameter_count


def rows_bytes(batch: int, tokens: int, width: int, itemsize: int = 4) -> int:
    """Bytes of a ``[B, T, width]`` tensor: soft tokens or logits (width V), embeddings (width D).

    >>> rows_bytes(1, 64, 32_000)          # the document's soft tokens, float32
    8192000
    """
    return batch * tokens * width * itemsize


def topk_bytes(batch: int, tokens: int, k: int, weight_itemsize: int = 4, index_itemsize: int = 8) -> int:
    """Bytes of top-k weights ``[B, T, K]`` with their indices ``[B, T, K]`` (``torch.topk`` gives int64).

    >>> topk_bytes(1, 64, 256), topk_bytes(1, 64, 256, index_itemsize=4)
    (196608, 131072)
    """
    return batch * tokens * k * (weight_itemsize + index_itemsize)


def gathered_embedding_bytes(batch: int, tokens: int, k: int, hidden: int, itemsize: int = 2) -> int:
    """Bytes of the gathered embeddings ``[B, T, K, D]``; their product with the weights is as large again.

    >>> gathered_embedding_bytes(1, 64, 256, 4096)
    134217728
    """
    return batch * tokens * k * hidden * itemsize


def mixing_flops(batch: int, tokens: int, support: int, hidden: int) -> int:
    """Floating point operations of mixing ``support`` embeddings for each token: ``2 B T support D``.

    >>> mixing_flops(1, 64, 32_000, 4096) // mixing_flops(1, 64, 256, 4096)
    125
    """
    return 2 * batch * tokens * support * hidden


def kv_cache_bytes_per_token(shape: ModelShape, itemsize: int = 2) -> int:
    """Bytes of keys and values of one token in all layers: ``2 L kv_heads head_dim itemsize``.

    >>> from grade.memory.shapes import QWEN3_4B
    >>> kv_cache_bytes_per_token(QWEN3_4B)
    147456
    """
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize


def token_forwards_uncached(prompt: int, new: int) -> int:
    """Tokens processed when each of ``new`` steps re-runs its whole prefix: ``sum_{t=0}^{new-1} (prompt + t)``.

    >>> token_forwards_uncached(32, 64)
    4064
    """
    return new * prompt + new * (new - 1) // 2


def token_forwards_cached(prompt: int, new: int) -> int:
    """Tokens processed with a KV cache, the last new token's among them: ``prompt + new``.

    >>> token_forwards_cached(32, 64)
    96
    """
    return prompt + new


def attention_scores_uncached(prompt: int, new: int) -> int:
    """Attention scores (a head, a layer) of the re-running loop: ``sum_{n=prompt}^{prompt+new-1} n^2``.

    >>> attention_scores_uncached(32, 128), attention_scores_uncached(32, 64)
    (1342144, 279904)
    """
    return _squares_below(prompt + new) - _squares_below(prompt)


def weights_bytes(shape: ModelShape, copies: int = 1, itemsize: int = 2) -> int:
    """Bytes of the weights, ``copies`` times.

    >>> from grade.memory.shapes import QWEN3_4B
    >>> weights_bytes(QWEN3_4B, copies=3)
    24134808576
    """
    return copies * parameter_count(shape) * itemsize


def lora_parameters(shape: ModelShape, r: int = 16, every: bool = False) -> int:
    """Parameters of an adapter of rank ``r`` on q, k, v and o: ``L r ((D + q) + 2 (D + kv) + (q + D))``.

    With ``every`` also on gate, up and down: ``+ 3 L r (D + I)``.

    >>> from grade.memory.shapes import QWEN25_1_5B, QWEN25_3B
    >>> lora_parameters(QWEN25_3B), lora_parameters(QWEN25_1_5B, 64, every=True)
    (7372800, 73859072)
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 * (shape.hidden + shape.intermediate) if every else 0
    return shape.layers * r * (2 * (shape.hidden + q) + 2 * (shape.hidden + kv) + mlp)


def adamw_bytes(parameters: int, itemsize: int = 4) -> int:
    """Bytes of AdamW's two moments, in the parameters' own type, without the step counts.

    >>> adamw_bytes(7_372_800)
    58982400
    """
    return 2 * parameters * itemsize


def checkpoint_bytes(shape: ModelShape, batch: int, length: int, itemsize: int = 2) -> int:
    """Bytes of the layers' inputs, all that checkpointing keeps: ``L B n D itemsize``.

    >>> from grade.memory.shapes import QWEN25_3B
    >>> checkpoint_bytes(QWEN25_3B, 2, 512)
    150994944
    """
    return shape.layers * rows_bytes(batch, length, shape.hidden, itemsize)


def scores_bytes(shape: ModelShape, batch: int, length: int, itemsize: int = 2) -> int:
    """Bytes of one layer's attention scores ``[B, heads, n, n]``, which fused attention never stores.

    >>> from grade.memory.shapes import QWEN25_3B
    >>> scores_bytes(QWEN25_3B, 2, 512)
    16777216
    """
    return batch * shape.heads * length * length * itemsize


def layer_activation_bytes(shape: ModelShape, batch: int, length: int, r: int = 16, itemsize: int = 2) -> dict:
    """Bytes that one layer keeps for backward, LoRA of rank ``r`` on q, k, v and o, fused CUDA attention with a mask.

    With ``N = B n`` tokens, ``q = heads * head_dim`` and s = ``itemsize``, in transformers' and PEFT's own code:

    - norms: two float32 copies of the input and a float32 factor a token, ``2 (4 N D + 4 N)``
    - adapter inputs: each float32 product of the adapter keeps a float32 copy of its own input, and its r outputs,
      ``4 (3 N D + N q) + 16 N r``
    - attention: q, the output, and k and v repeated for every query head, ``4 s N q``; the mask, ``s B n^2``, each
      layer's own; row statistics, ``4 B heads ceil32(n)``; two counters of 512 bytes
    - MLP: gate, its SiLU, and up, ``3 s N I``

    Args:
        shape: The model; without query and key norms, which keep more.
        batch: B.
        length: n, a multiple of 16 (CUDA pads other masks).
        r: Rank.
        itemsize: s, 2 for a half-precision base. In float32 norms and adapter need no copies, which is not covered.

    Returns:
        Bytes by group.

    >>> from grade.memory.shapes import QWEN25_3B
    >>> layer_activation_bytes(QWEN25_3B, 2, 512)["MLP"]
    67633152
    """
    tokens, q = batch * length, shape.heads * shape.head_dim
    return {
        "norms": 2 * (4 * tokens * shape.hidden + 4 * tokens),
        "adapter inputs": 4 * (3 * tokens * shape.hidden + tokens * q) + 16 * tokens * r,
        "attention": 4 * itemsize * tokens * q + itemsize * batch * length**2
        + 4 * batch * shape.heads * -(-length // 32) * 32 + 2 * 512,
        "MLP": 3 * itemsize * tokens * shape.intermediate,
    }  # fmt: skip


def _squares_below(n: int) -> int:
    """``0^2 + 1^2 + ... + (n-1)^2``."""
    return (n - 1) * n * (2 * n - 1) // 6
