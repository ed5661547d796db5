"""What is trained, and on what: parameters, and a fingerprint of frozen weights.

The fingerprint says what an adapter or a reward was trained on, and is cheap for a model of any size. Names and shapes
of all tensors are hashed, and of each tensor 64 elements at fixed places. A base may be loaded in another type than the
one it was trained in, so the elements are rounded first: to bfloat16, which is the same from float64, float32 and
bfloat16, and to float16, which is the same from float64, float32 and float16. Two fingerprints are compared in the
roundings that both have. A base in bfloat16 and one in float16 have none in common; then names and shapes decide.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

_ELEMENTS, _STRIDE = 64, 2_654_435_761
"""A prime far above any width (2^32 over the golden ratio): the places fall into all rows and columns."""
_KEPT = "_whole_fingerprint"
"""Attribute of a module whose weights are no longer all here."""
_ROUNDINGS = {"bfloat16": (torch.bfloat16, torch.float16), "float16": (torch.float16, torch.bfloat16)}
"""For each rounding its type, and the type that has lost digits which it needs."""


def trained_parameters(policy: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, in a fixed order."""
    return [p for p in policy.parameters() if p.requires_grad]


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors of any shapes, one after the other as one vector [P].

    Not `torch.nn.utils.parameters_to_vector`, which takes views and so raises for gradients that are transposed.
    """
    return torch.cat([tensor.flatten() for tensor in tensors])


@torch.no_grad()
def set_values(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Overwrite parameters in place, one value for each."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@contextlib.contextmanager
def restoring(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this context the parameters may change; afterwards they are as before, bit by bit."""
    before = [p.detach().clone() for p in parameters]
    try:
        yield
    finally:
        set_values(parameters, before)


@torch.no_grad()
def fingerprint(module: nn.Module) -> dict[str, str]:
    """SHA-256 of the frozen weights of a base, or of a part of one; LoRA layers on it are passed over.

    ``shapes`` and, of the sampled elements, ``bfloat16`` and ``float16`` as far as its type allows. Nothing for weights
    on the meta device, and for quantised ones: what was trained on them is also used on those that they stand for.
    """
    if (kept := getattr(module, _KEPT, None)) is not None:
        return dict(kept)
    named = sorted(_frozen(module).items())
    types = {p.dtype for _, p in named}
    # bitsandbytes keeps 8 bits as integers, and 4 bits in any type that it is told to.
    if any(p.is_meta or hasattr(p, "quant_state") or not p.is_floating_point() for _, p in named):
        return {}
    content = {"shapes": json.dumps([[name, list(p.shape)] for name, p in named]).encode()}
    places = torch.arange(_ELEMENTS) * _STRIDE
    samples = [p.flatten()[(places % p.numel()).to(p.device)].float().cpu() for _, p in named if p.numel()]
    for name, (dtype, coarser) in _ROUNDINGS.items():
        if coarser not in types:
            content[name] = torch.cat([torch.zeros(0), *samples]).to(dtype).view(torch.int16).numpy().tobytes()
    return {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}


def _frozen(module: nn.Module) -> dict[str, nn.Parameter]:
    """Weights of a base by the names that they have without LoRA layers."""
    named = module.named_parameters()
    return {name.replace(".base_layer.", "."): p for name, p in named if ".lora_" not in f".{name}"}


@torch.no_grad()
def share_equal(module: nn.Module, base: nn.Module) -> None:
    """Let the weights of a module that equal a base's, bit for bit and by name, be the base's; neither may change.

    If there are any, the others are copied: all weights of a file may lie in one mapping, which would stay.
    """
    known, own, shared = _frozen(base), [], []
    for name, p in _frozen(module).items():
        other = known.get(name)
        same = other is not None and (p.dtype, p.device) == (other.dtype, other.device) and torch.equal(p, other)
        (shared if same else own).append((p, other))
    for p, other in shared:
        p.data = other.data
    for p, _ in own if shared else ():
        p.data = p.data.clone()


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
