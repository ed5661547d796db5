"""Faster linear layers for a few rows on a CPU, as in a decoding step.

With few rows, ``x W^T`` reads the whole weight for little arithmetic, but BLAS libraries tile for many rows. Computed
as ``(W x^T)^T``, at most four columns at a time, the same product streams the weight at about twice the speed (float32,
AVX2: 30 layers of 1536 x 576, 4 rows: 14.7 ms against 6.0 ms). The result differs by rounding only.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

COLUMNS = 4
MAX_ROWS = 8
DEVICES: tuple[str, ...] = ("cpu",)
"""Devices where this is done; the memory tracer adds meta when it traces for a CPU."""


class SkinnyLinear(TorchFunctionMode):
    """Within this context `F.linear` of up to 8 rows on a CPU, without gradient, is computed column by column."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: D105 - the hook of TorchFunctionMode
        if func is F.linear and not kwargs and _fits(args[0], args[1]):
            return skinny_linear(*args)
        return func(*args, **(kwargs or {}))


def skinny_products(weight: Tensor) -> contextlib.AbstractContextManager[object]:
    """`SkinnyLinear` where it would do anything; elsewhere nothing, as the mode costs a call for every operator.

    Args:
        weight: One of the base: its device and type.
    """
    fits = weight.device.type in DEVICES and weight.dtype == torch.float32
    return SkinnyLinear() if fits else contextlib.nullcontext()


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` for few rows.

    Args:
        x: [..., n_in].
        weight: [n_out, n_in].
        bias: [n_out] or None.

    Returns:
        [..., n_out].

    >>> x, w = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
    >>> torch.equal(skinny_linear(x, w), x @ w.T)
    True
    """
    rows = x.reshape(-1, x.shape[-1])
    out = torch.cat([torch.mm(weight, part.t()).t() for part in rows.split(COLUMNS)])
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], -1)


def _fits(x: Tensor, weight: Tensor) -> bool:
    rows = x.numel() // max(x.shape[-1], 1)
    return x.device.type in DEVICES and x.dtype == weight.dtype == torch.float32 and 1 < rows <= MAX_ROWS
