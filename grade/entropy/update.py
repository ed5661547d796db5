"""The step that an optimizer is about to take, as a vector.

AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with t the coming step and g the (clipped) gradient:

    m = beta1 m' + (1 - beta1) g        v = beta2 v' + (1 - beta2) g^2
    delta theta = -lr [ (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + wd theta ]

The step is the sum of three parts: from the old momentum m' and the new gradient, over the same denominator, and from
weight decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grade.errors import InputError
from grade.models.parameters import flatten


@dataclass(frozen=True)
class UpdateVector:
    """``delta theta`` and its parts, each [P]."""

    momentum: Tensor  # part of the old momentum: the step for a zero gradient, with the same denominator
    gradient: Tensor  # part of the new gradient
    decay: Tensor  # part of weight decay
    clipped: float  # factor by which clipping scaled the gradient, 1 if it was not clipped

    @property
    def total(self) -> Tensor:
        """``delta theta``: learning rate included, so that theta + total is where the optimizer goes."""
        return self.momentum + self.gradient + self.decay


@torch.no_grad()
def adamw_update(
    optimizer: torch.optim.AdamW, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor],
    max_grad_norm: float | None = None,
) -> UpdateVector:  # fmt: skip
    """The step that ``optimizer.step()`` would take, without taking it, in the parameters' type.

    ``max_grad_norm`` clips the norm over all gradients as `torch.nn.utils.clip_grad_norm_` does.
    """
    groups = _groups(optimizer)
    plain = not any(group.get(option) for group in optimizer.param_groups for option in ("amsgrad", "maximize"))
    if type(optimizer) is not torch.optim.AdamW or not plain:
        raise InputError("optimizer", type(optimizer).__name__, "AdamW without amsgrad and maximize")
    clipped = 1.0
    if max_grad_norm is not None:
        norm = torch.stack([g.norm() for g in gradients]).norm()
        clipped = min(1.0, float(max_grad_norm / (norm + 1e-6)))  # torch's own epsilon
    parts = []
    for p, g in zip(parameters, gradients, strict=True):
        group, state = groups[id(p)], optimizer.state.get(p, {})
        (beta1, beta2), lr, t = group["betas"], float(group["lr"]), int(state["step"]) + 1 if state else 1
        g = g * clipped
        old = state["exp_avg"] if state else torch.zeros_like(p)
        second = beta2 * (state["exp_avg_sq"] if state else torch.zeros_like(p)) + (1 - beta2) * g * g
        denominator = second.sqrt() / math.sqrt(1 - beta2**t) + group["eps"]
        scale = -lr / (1 - beta1**t) / denominator
        parts.append((scale * beta1 * old, scale * (1 - beta1) * g, -lr * group["weight_decay"] * p))
    return UpdateVector(*(flatten(part) for part in zip(*parts, strict=True)), clipped)


def _groups(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    """The options of each parameter, by its id."""
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}


@torch.no_grad()
def preconditioner(optimizer: torch.optim.AdamW, parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """AdamW's preconditioner ``P = 1 / (sqrt(v' / (1 - beta2^t')) + eps)`` [P], with t' steps taken; None before any.

    It does not depend on the coming gradient, so products of independent gradients stay unbiased.
    """
    groups, parts = _groups(optimizer), []
    for p in parameters:
        group, state = groups[id(p)], optimizer.state.get(p, {})
        if not state:
            return None
        second = state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))
        parts.append(1 / (second.sqrt() + group["eps"]))
    return flatten(parts)
