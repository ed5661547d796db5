"""The attention kernels of a device, on tensors without data.

On ``meta`` torch has no attention kernels and uses the unfused formula, which keeps the scores. Here fused attention is
called as on the device: outputs and tensors saved for backward have the kernel's own shapes. Left out: CUDA's
cuDNN attention, which some versions of torch prefer on some GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from grade.models import sampling
from grade.models.sharding import ShardedTable

Device = Literal["cpu", "cuda"]
_BLOCK = 16  # CUDA's memory-efficient kernel needs rows of a mask in multiples of this


def _cpu_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return fused(query, key, value, dropout_p, is_causal, attn_mask=_additive(attn_mask, query), scale=scale)[0]


def _cuda_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Flash attention without a mask, the memory-efficient kernel with one or in float32: torch's own order."""
    if attn_mask is None and query.dtype != torch.float32:
        fused = torch.ops.aten._scaled_dot_product_flash_attention
        return fused(query, key, value, dropout_p, is_causal, return_debug_mask=False, scale=scale)[0]
    if enable_gqa:  # the memory-efficient kernel has no grouped queries
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    bias = _additive(attn_mask, query)
    if bias is not None:
        length = bias.shape[-1]
        bias = F.pad(bias, (0, -length % _BLOCK))[..., :length] if length % _BLOCK else bias
        bias = bias.expand(*query.shape[:3], length)
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(query, key, value, bias, keep, dropout_p, is_causal, scale=scale)[0]


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A Boolean mask as 0 and -inf, the form that torch passes to every kernel."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


_RealGenerator = torch.Generator


class _Generator(torch.Generator):
    """Generators that exist on meta too, where nothing is drawn from them (`grade.memory.nodata.NoData`)."""

    device = torch.device("meta")

    def __new__(cls, device: torch.device | str = "cpu") -> torch.Generator:
        return super().__new__(cls) if torch.device(device).type == "meta" else _RealGenerator(device)


class _SmallBags(TorchDispatchMode):
    """A bag's sum keeps one number per bag on a CPU; on CUDA and on meta it keeps one per index."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if ShardedTable in types:
            return NotImplemented  # it gathers its rows first
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._embedding_bag and args[0].device.type == "meta":
            result = (result[0], torch.empty_like(args[2]), *result[2:])
        return result


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Within this context a step on tensors without data uses the kernels of ``device``.

    Attention is replaced in `torch.nn.functional`, where models look it up, and not by a `TorchFunctionMode`: torch
    leaves such modes while ``backward`` runs, and so while it recomputes checkpointed layers. transformers drops the
    mask of a batch without padding; a batch without data is taken to have some.

    Args:
        device: cpu or cuda.
    """
    attention, fused = F.scaled_dot_product_attention, _cuda_attention if device == "cuda" else _cpu_attention

    def on_meta_too(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (fused if query.device.type == "meta" else attention)(query, *args, **kwargs)

    with (
        patch.object(sampling, "SKINNY_DEVICES", ("cpu", "meta") if device == "cpu" else ()),
        patch.object(F, "scaled_dot_product_attention", on_meta_too),
        patch.object(torch, "Generator", _Generator),
        patch.object(masking_utils, "is_tracing", lambda *_: True),
        _SmallBags() if device == "cpu" else contextlib.nullcontext(),
    ):
        yield
