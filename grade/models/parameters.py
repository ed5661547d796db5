"""Trainable parameters as one vector: listed, flattened, split, moved along a direction, put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from grade.errors import InputError
from grade.models.backbone import Backbone


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


@contextlib.contextmanager
def moved(backbone: Backbone, vector: Tensor, eta: float) -> Iterator[None]:
    """Within this context the parameters are ``theta + eta v``; afterwards they are theta again, bit by bit.

    v [P] is in the order of `trained_parameters`.
    """
    parameters, parts = trained_parameters(backbone), split_vector(backbone, vector)
    with restoring(parameters):
        with torch.no_grad():
            for p, part in zip(parameters, parts, strict=True):
                p.add_(part, alpha=eta)
        yield


def split_vector(backbone: Backbone, vector: Tensor) -> list[Tensor]:
    """A vector [P] in the order of `trained_parameters`, cut and shaped like each, in its type and on its device."""
    parameters = trained_parameters(backbone)
    size = sum(p.numel() for p in parameters)
    if vector.shape != (size,):
        raise ValueError(f"update vector has shape {list(vector.shape)}, not [{size}]: one number per parameter")
    parts = vector.split([p.numel() for p in parameters])
    return [part.view_as(p).to(p) for p, part in zip(parameters, parts, strict=True)]


def trained_parameters(backbone: Backbone) -> list[nn.Parameter]:
    """The parameters that are trained, if there are any and they are an adapter's only."""
    named = [(name, p) for name, p in backbone.model.named_parameters() if p.requires_grad]
    base = [name for name, _ in named if "lora_" not in name]
    if not named:
        raise InputError("trained parameters", "none", "a policy with an adapter")
    if base:
        raise InputError("trained parameters", base[0], "an adapter's only")
    return [p for _, p in named]
