"""A real optimizer step that is undone: to measure its effect without taking it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grade.models.backbone import Backbone
from grade.models.parameters import set_values, trained_parameters


@dataclass(frozen=True)
class Snapshot:
    """Everything a step can change: parameters, their gradients, optimizer, random state, train and eval flags.

    Copies are on the CPU, so no second copy of the adapter takes device memory. The optimizer's state is deep-copied:
    ``state_dict()`` shares its tensors with the optimizer, which keeps updating them.
    """

    backbone: Backbone
    optimizer: torch.optim.Optimizer
    parameters: list[Tensor]
    gradients: list[Tensor | None]
    state: dict[str, Any]
    random: list[Tensor]
    training: list[bool]

    @classmethod
    def of(cls, backbone: Backbone, optimizer: torch.optim.Optimizer) -> Snapshot:
        """Copy everything that `restore` puts back.

        Args:
            backbone: The policy.
            optimizer: Its optimizer.

        Returns:
            The snapshot.
        """
        parameters = trained_parameters(backbone)
        return cls(
            backbone,
            optimizer,
            [p.detach().to("cpu", copy=True) for p in parameters],
            [p.grad for p in parameters],
            copy.deepcopy(optimizer.state_dict()),
            [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])],
            [m.training for m in backbone.modules()],
        )

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, bit by bit."""
        parameters = trained_parameters(self.backbone)
        set_values(parameters, self.parameters)
        for p, grad in zip(parameters, self.gradients, strict=True):
            p.grad = grad
        self.optimizer.load_state_dict(self.state)
        torch.set_rng_state(self.random[0])
        if len(self.random) > 1:
            torch.cuda.set_rng_state_all(self.random[1:])
        for module, flag in zip(self.backbone.modules(), self.training, strict=True):
            module.training = flag


@contextlib.contextmanager
def stepped(
    backbone: Backbone,
    optimizer: torch.optim.Optimizer,
    gradients: Sequence[Tensor],
    max_grad_norm: float | None = None,
) -> Iterator[None]:
    """Within this context the optimizer has taken its step; afterwards everything is restored.

    Args:
        backbone: The policy.
        optimizer: Its optimizer.
        gradients: Gradient of the loss for each trained parameter.
        max_grad_norm: Clip the norm over all gradients to this; None: no clipping.
    """
    snapshot = Snapshot.of(backbone, optimizer)
    try:
        parameters = trained_parameters(backbone)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.to(p, copy=True)
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
        yield
    finally:
        snapshot.restore()
