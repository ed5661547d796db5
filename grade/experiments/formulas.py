"""Byte and token counts in closed form, each exact for the tensors it names.

What a framework adds (saved activations of a layer, temporaries, the allocator) is counted by `grade.memory.tracker`.
"""

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


def token_forwards_uncached(prompt: int, new: int) -> int:
    """Tokens processed when each of ``new`` steps re-runs its whole prefix: ``sum_{t=0}^{new-1} (prompt + t)``."""
    return new * prompt + new * (new - 1) // 2


def lora_parameters(shape: ModelShape, r: int = 16, every: bool = False) -> int:
    """Parameters of an adapter of rank ``r`` on q, k, v and o: ``L r ((D + q) + 2 (D + kv) + (q + D))``.

    With ``every`` also on gate, up and down: ``+ 3 L r (D + I)``.
    """
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = 3 * (shape.hidden + shape.intermediate) if every else 0
    return shape.layers * r * (2 * (shape.hidden + q) + 2 * (shape.hidden + kv) + mlp)


def layer_activation_bytes(shape: ModelShape, batch: int, length: int) -> dict[str, int]:
    """Bytes by group that one layer keeps for backward: LoRA of rank r = 16 on q, k, v and o, CUDA attention, a mask.

    With ``N = B n`` tokens, ``q = heads * head_dim`` and s = 2 bytes, in transformers' and PEFT's own code:

    - norms: two float32 copies of the input and a float32 factor per token, ``2 (4 N D + 4 N)``
    - adapter inputs: each float32 product of the adapter keeps a float32 copy of its own input, and its r outputs,
      ``4 (3 N D + N q) + 16 N r``
    - attention: q, the output, and k and v repeated for every query head, ``4 s N q``; the mask, ``s B n^2``, each
      layer's own; row statistics, ``4 B heads ceil32(n)``; two counters of 512 bytes
    - MLP: gate, its SiLU, and up, ``3 s N I``

    For a half-precision base without query and key norms, and n a multiple of 16 (CUDA pads other masks).
    """
    tokens, q, r, itemsize = batch * length, shape.heads * shape.head_dim, 16, 2
    return {
        "norms": 2 * (4 * tokens * shape.hidden + 4 * tokens),
        "adapter inputs": 4 * (3 * tokens * shape.hidden + tokens * q) + 16 * tokens * r,
        "attention": 4 * itemsize * tokens * q + itemsize * batch * length**2
        + 4 * batch * shape.heads * -(-length // 32) * 32 + 2 * 512,
        "MLP": 3 * itemsize * tokens * shape.intermediate,
    }  # fmt: skip
