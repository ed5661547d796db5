"""What an adapter or a reward was trained on: a fingerprint of frozen weights, cheap for a model of any size.

Names and shapes of all tensors are hashed, and of each tensor 64 elements at fixed places. A base may be loaded in
another type than the one it was trained in, so the elements are rounded first: to bfloat16, which is the same from
float64, float32 and bfloat16, and to float16, which is the same from float64, float32 and float16. Two fingerprints
are compared in the roundings that both have. A base in bfloat16 and one in float16 have none in common; then names and
shapes decide.

Left out: what depends on how a base is used, such as its tokenizer.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn

ELEMENTS = 64
_STRIDE = 2_654_435_761
"""A prime far above any width (2^32 over the golden ratio): the places fall into all rows and columns."""
_KEPT = "_whole_fingerprint"
"""Attribute of a module whose weights are no longer all here."""
_ROUNDINGS = {"bfloat16": (torch.bfloat16, torch.float16), "float16": (torch.float16, torch.bfloat16)}
"""For each rounding its type, and the type that has lost digits which it needs."""


@torch.no_grad()
def fingerprint(module: nn.Module) -> dict[str, str]:
    """SHA-256 of the frozen weights of a base, or of a part of one; LoRA layers on it are passed over.

    ``shapes`` and, of the sampled elements, ``bfloat16`` and ``float16`` as far as its type allows; nothing for weights
    on the meta device.
    """
    if (kept := getattr(module, _KEPT, None)) is not None:
        return dict(kept)
    frozen = [(name, p) for name, p in module.named_parameters() if ".lora_" not in f".{name}"]
    named = sorted((name.replace(".base_layer.", "."), p) for name, p in frozen)
    if any(p.is_meta for _, p in named):
        return {}
    types = {p.dtype for _, p in named}
    shapes = json.dumps([[name, list(p.shape)] for name, p in named])
    hashes = {"shapes": hashlib.sha256(shapes.encode()).hexdigest()}
    places = torch.arange(ELEMENTS) * _STRIDE
    samples = [p.flatten()[(places % p.numel()).to(p.device)].float().cpu() for _, p in named if p.numel()]
    for name, (dtype, coarser) in _ROUNDINGS.items():
        if coarser not in types:
            bits = torch.cat(samples).to(dtype).view(torch.int16) if samples else torch.zeros(0, dtype=torch.int16)
            hashes[name] = hashlib.sha256(bits.numpy().tobytes()).hexdigest()
    return hashes


def keep_fingerprint(module: nn.Module) -> None:
    """Remember the fingerprint of a module whose weights do not change any more, for when they are not all here."""
    setattr(module, _KEPT, fingerprint(module))


def same_base(stored: dict[str, str], here: dict[str, str]) -> bool:
    """Whether two fingerprints agree in all that both have.

    >>> same_base({"shapes": "a", "bfloat16": "b"}, {"shapes": "a", "float16": "c"})
    True
    >>> same_base({"shapes": "a", "bfloat16": "b"}, {"shapes": "a", "bfloat16": "c"})
    False
    """
    return all(stored[key] == here[key] for key in stored.keys() & here.keys())
