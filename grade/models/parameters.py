"""Trainable parameters as one vector: listed, moved along a direction, split."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grade.errors import InputError
from grade.models.backbone import Backbone


@contextlib.contextmanager
def moved(backbone: Backbone, vector: Tensor, eta: float) -> Iterator[None]:
    """Within this context the parameters are ``theta + eta v``; afterwards they are theta again, bit by bit.

    Args:
        backbone: The policy.
        vector: v [P], in the order of `trained_parameters`.
        eta: Step size.
    """
    parameters = trained_parameters(backbone)
    size = sum(p.numel() for p in parameters)
    if vector.shape != (size,):
        raise InputError("update vector", list(vector.shape), f"[{size}], one number for each trained parameter")
    kept = [p.detach().clone() for p in parameters]
    try:
        with torch.no_grad():
            for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
                p.add_(part.view_as(p).to(p), alpha=eta)
        yield
    finally:
        with torch.no_grad():
            for p, value in zip(parameters, kept, strict=True):
                p.copy_(value)


def split_vector(backbone: Backbone, vector: Tensor) -> list[Tensor]:
    """A vector over all trained parameters, cut and shaped like each of them.

    Args:
        backbone: The policy.
        vector: v [P], in the order of `trained_parameters`.

    Returns:
        One tensor for each parameter, in its type and on its device.

    Raises:
        InputError: If the vector does not fit.
    """
    parameters = trained_parameters(backbone)
    size = sum(p.numel() for p in parameters)
    if vector.shape != (size,):
        raise InputError("update vector", list(vector.shape), f"[{size}], one number for each trained parameter")
    parts = vector.split([p.numel() for p in parameters])
    return [part.view_as(p).to(p) for p, part in zip(parameters, parts, strict=True)]


def trained_parameters(backbone: Backbone, allow_full: bool = False) -> list[nn.Parameter]:
    """The parameters that gradients are taken of.

    Args:
        backbone: The policy.
        allow_full: Accept trained weights of the base.

    Returns:
        Its trainable parameters.

    Raises:
        InputError: If there are none, or (by rule, not by number) one is not an adapter's.
    """
    named = [(name, p) for name, p in backbone.model.named_parameters() if p.requires_grad]
    base = [name for name, _ in named if "lora_" not in name]
    if not named:
        raise InputError("trained parameters", "none", "a policy with an adapter")
    if base and not allow_full:
        raise InputError("trained parameters", base[0], "an adapter's only; allow_full accepts the base's as well")
    return [p for _, p in named]
