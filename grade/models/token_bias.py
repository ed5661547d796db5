"""The token bias: one vector b of V numbers, in nats, that the policy adds to its logits and the reference does not.

    log pi(v | y_<t)  =  l_v + b_v - log sum_u exp(l_u + b_u)

with the model's logits l after their scale and soft cap and before the temperature, as ``logit_bias`` of servers and
``sequence_bias`` of transformers are added. It has what depends on the token alone and not on its context: the optimum
of ``E[s(y_t)] - KL_t / c`` at every position is ``b = c s``. `grade.models.head.Head` adds it.

Beside an adapter, or alone, it is saved as ``token_bias.safetensors``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from grade.errors import InputError
from grade.files import atomic

BIAS_FILE = "token_bias.safetensors"
_NAME, _BASE = "token_bias", "base_model_name_or_path"


class TokenBias(nn.Module):
    """Where a bias lives: one for all views of a backbone, as there is one adapter for them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("values", None)  # [V], float32, or float64 for a float64 model
        self.on = True  # whether the policy's role is played, and not the reference's

    @torch.no_grad()
    def set(self, values: Tensor, trainable: bool | None = None) -> None:
        """Take other values [V], in place if there are some; ``trainable``: None leaves it as it is, at first False."""
        if self.values is None:
            self.values = nn.Parameter(values.detach().clone(), bool(trainable))
        else:
            self.values.copy_(values)
            self.values.requires_grad_(self.values.requires_grad if trainable is None else trainable)

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within this context there is none."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def save(self, folder: Path, base: str) -> None:
        """Write ``token_bias.safetensors`` with the values and the name of their base."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic(folder / BIAS_FILE) as new:
            save_file({_NAME: self.values.detach().cpu().contiguous()}, new, {_BASE: base})


def saved_bias(folder: str | Path, vocab: int | None = None) -> tuple[Tensor | None, str]:
    """The saved values [V], None if the folder has none, and the name of the base that they were made for.

    `InputError` if they are not V = ``vocab``; None: any number.
    """
    if not (file := Path(folder) / BIAS_FILE).is_file():
        return None, ""
    with safe_open(file, "pt") as saved:
        values, about = saved.get_tensor(_NAME), saved.metadata() or {}
    if vocab is not None and values.shape != (vocab,):
        raise InputError("token_bias", list(values.shape), f"[{vocab}] numbers, as the head has tokens ({file})")
    return values, about.get(_BASE, "")
