"""Adapter and optimizer state at one step of a run, held in memory until results are written."""

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
from grade.models.parameters import restoring, set_values

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
        """Copy the present adapter and optimizer state.

        Args:
            backbone: The policy.
            optimizer: Its optimizer.

        Returns:
            The checkpoint.
        """
        parameters = [p.detach().to("cpu", copy=True) for p in backbone.trainable_parameters()]
        # A deep copy: state_dict() shares its tensors with the optimizer, which keeps updating them.
        return cls(parameters, copy.deepcopy(optimizer.state_dict()))

    def save(self, backbone: Backbone, folder: str | Path) -> None:
        """Write the adapter as PEFT does, and ``optimizer.pt``.

        Args:
            backbone: The policy; its own parameters are unchanged afterwards.
            folder: Target folder.
        """
        parameters = backbone.trainable_parameters()
        with restoring(parameters):
            set_values(parameters, self.parameters)
            backbone.save_adapter(folder)
        torch.save(self.optimizer, Path(folder) / OPTIMIZER_FILE)


def load_optimizer(optimizer: torch.optim.Optimizer, path: str | Path) -> None:
    """Load a saved ``state_dict`` without executing code from the file.

    Args:
        optimizer: The optimizer of the adapter that was saved; unchanged if the file does not fit.
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
