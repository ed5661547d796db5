"""A training run at one step: adapter and optimizer state, held in memory until results are written."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.backbone import Backbone

OPTIMIZER_FILE = "optimizer.pt"


@dataclass(frozen=True)
class Checkpoint:
    """Copies on the CPU.

    Attributes:
        parameters: The trained parameters, in the model's order.
        optimizer: The optimizer's ``state_dict``.
    """

    parameters: list[Tensor]
    optimizer: dict[str, Any]

    @classmethod
    def of(cls, backbone: Backbone, optimizer: torch.optim.Optimizer) -> Checkpoint:
        """Copy adapter and optimizer state as they are now.

        Args:
            backbone: The policy.
            optimizer: Of its trained parameters.

        Returns:
            The checkpoint.
        """
        parameters = [p.detach().to("cpu", copy=True) for p in backbone.trainable_parameters()]
        # A deep copy: state_dict() shares its tensors with the optimizer, which goes on changing them.
        return cls(parameters, copy.deepcopy(optimizer.state_dict()))

    @torch.no_grad()
    def save(self, backbone: Backbone, folder: str | Path) -> None:
        """Write the adapter as PEFT does, and ``optimizer.pt``.

        Args:
            backbone: The policy, which is as before afterwards.
            folder: Target folder.
        """
        now = [p.detach().clone() for p in backbone.trainable_parameters()]
        try:
            for p, value in zip(backbone.trainable_parameters(), self.parameters, strict=True):
                p.copy_(value)
            backbone.save_adapter(folder)
        finally:
            for p, value in zip(backbone.trainable_parameters(), now, strict=True):
                p.copy_(value)
        torch.save(self.optimizer, Path(folder) / OPTIMIZER_FILE)


def load_optimizer(optimizer: torch.optim.Optimizer, path: str | Path) -> None:
    """Load a saved ``state_dict``, without running code that a file may hold.

    Args:
        optimizer: Of the adapter that the state belongs to; unchanged if the file does not fit.
        path: The file.

    Raises:
        InputError: If it is missing, of another kind or of another adapter.
    """
    before = copy.deepcopy(optimizer.state_dict())
    try:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
        for group in optimizer.param_groups:
            for p in group["params"]:
                for name, value in optimizer.state.get(p, {}).items():
                    if name != "step" and isinstance(value, Tensor) and value.shape != p.shape:
                        raise ValueError(f"{name} of shape {list(value.shape)} for {list(p.shape)}")
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        optimizer.load_state_dict(before)
        reason = str(error).splitlines()[0] if str(error) else error.__class__.__name__
        raise InputError("optimizer state", str(path), f"AdamW's state_dict for this adapter ({reason})") from None
