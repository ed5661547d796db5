"""A step in all that is trained, as one vector."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grade.models.parameters import restoring, trained_parameters


def split_vector(policy: nn.Module, vector: Tensor) -> list[Tensor]:
    """A vector [P] in the order of `trained_parameters`, cut and shaped like each, in its type and on its device."""
    parameters = trained_parameters(policy)
    parts = vector.split([p.numel() for p in parameters])
    return [part.view_as(p).to(p) for p, part in zip(parameters, parts, strict=True)]


@contextlib.contextmanager
def moved(policy: nn.Module, vector: Tensor, eta: float) -> Iterator[None]:
    """Within this context the parameters are ``theta + eta v``; afterwards they are theta again, bit by bit.

    v [P] is in the order of `trained_parameters`.
    """
    parameters, parts = trained_parameters(policy), split_vector(policy, vector)
    with restoring(parameters):
        with torch.no_grad():
            for p, part in zip(parameters, parts, strict=True):
                p.add_(part, alpha=eta)
        yield
