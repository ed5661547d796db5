"""Where a traced step needs private parts of torch and transformers, or other functions in place of theirs.

Tried with torch 2.13 and transformers 5.23.

- On ``meta`` torch has no attention kernels and uses the unfused formula, which keeps the scores. Here fused attention
  is called as on the device: outputs and tensors saved for backward have the kernel's own shapes. It is replaced in
  `torch.nn.functional`, where models look it up, and not by a `TorchFunctionMode`: torch leaves such modes while
  ``backward`` runs, and so while it recomputes checkpointed layers. Left out: CUDA's cuDNN attention, which some
  versions of torch prefer on some GPUs.
- `torch.Generator` knows no ``meta``, where nothing is drawn (`grade.memory.meta.NoData`).
- transformers drops the mask of a batch without padding, unless it is tracing: a batch without data is assumed padded.
- A bag's sum keeps one number per bag on a CPU, and one per index on CUDA and on ``meta``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import masking_utils

from grade.memory.settings import Device
from grade.memory.tracker import DispatchMode

_BLOCK = 16  # CUDA's memory-efficient kernel needs rows of a mask in multiples of this
_RealGenerator = torch.Generator


def _fused_attention(
    device: Device, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """On a GPU flash attention without a mask, the memory-efficient kernel with one or in float32, as torch chooses."""
    kernels, bias = torch.ops.aten, _additive(attn_mask, query)
    if device == "cpu":
        fused = kernels._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)[0]
    if bias is None and query.dtype != torch.float32:
        fused = kernels._scaled_dot_product_flash_attention
        return fused(query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale)[0]
    if enable_gqa:  # the memory-efficient kernel has no grouped queries
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if bias is not None:
        length = bias.shape[-1]
        bias = F.pad(bias, (0, -length % _BLOCK))[..., :length] if length % _BLOCK else bias
        bias = bias.expand(*query.shape[:3], length)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    fused = kernels._scaled_dot_product_efficient_attention
    return fused(query, key, value, bias, keep, dropout_p, is_causal, scale=scale)[0]


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A Boolean mask as 0 and -inf, the form that torch passes to every kernel."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


class _Generator(torch.Generator):
    device = torch.device("meta")

    def __new__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        return super().__new__(cls) if torch.device(device).type == "meta" else _RealGenerator(device)


class _SmallBags(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._embedding_bag and args[0].device.type == "meta":
            result = (result[0], torch.empty_like(args[2]), *result[2:])
        return result


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Within this context a step on ``meta`` uses the kernels of ``device``.

    For fake tensors torch chooses as on a CPU.
    """
    attention = F.scaled_dot_product_attention

    def on_meta_too(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not query.is_meta:
            return attention(query, *args, **kwargs)
        return _fused_attention(device, query, *args, **kwargs)

    with (
        patch.object(F, "scaled_dot_product_attention", on_meta_too),
        patch.object(torch, "Generator", _Generator),
        patch.object(masking_utils, "is_tracing", lambda *_: True),
        _SmallBags() if device == "cpu" else contextlib.nullcontext(),
    ):
        yield
