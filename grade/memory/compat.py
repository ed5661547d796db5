"""Where a traced step needs private parts of torch and transformers, or other functions in place of theirs.

Tried with torch 2.13 and transformers 5.23; nothing outside this module names a private part of FSDP2.

- On ``meta`` torch has no attention kernels and uses the unfused formula, which keeps the scores. Here fused attention
  is called as on the device: outputs and tensors saved for backward have the kernel's own shapes. It is replaced in
  `torch.nn.functional`, where models look it up, and not by a `TorchFunctionMode`: torch leaves such modes while
  ``backward`` runs, and so while it recomputes checkpointed layers. Left out: CUDA's cuDNN attention, which some
  versions of torch prefer on some GPUs.
- `torch.Generator` knows no ``meta``, where nothing is drawn (`grade.memory.meta.NoData`).
- transformers drops the mask of a batch without padding, unless it is tracing: a batch without data is assumed padded.
- A bag's sum keeps one number per bag on a CPU, and one per index on CUDA and on ``meta``.
- FSDP2 resizes storages without an operator, refuses weights on ``meta`` (they would have to be filled before they are
  trained) and asks for their device's streams, of which ``meta`` has none.
- The other processes of a trace do not exist: torch's ``fake`` process group does nothing in a collective operation, so
  that what is left is what this process allocates. Left out: buffers of the communication library itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # noqa: F401 - collective operations on meta
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

from grade.errors import InputError
from grade.memory.records import Category, LiveTracker
from grade.memory.settings import Device
from grade.memory.tracker import DispatchMode
from grade.models import sampling
from grade.models.backbone import Backbone
from grade.models.sharding import RowShards, ShardedTable

_BLOCK = 16  # CUDA's memory-efficient kernel needs rows of a mask in multiples of this
MOST_PROCESSES = 2**14
"""Whose parts of each layer are listed in seconds."""
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
        if ShardedTable in types:
            return NotImplemented  # it gathers its rows first
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
        patch.object(sampling, "SKINNY_DEVICES", ("cpu", "meta") if device == "cpu" else ()),
        patch.object(F, "scaled_dot_product_attention", on_meta_too),
        patch.object(torch, "Generator", _Generator),
        patch.object(masking_utils, "is_tracing", lambda *_: True),
        _SmallBags() if device == "cpu" else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def alone_among(processes: int) -> Iterator[None]:
    """Within this context this process is the first of several that do not exist, also for weights on ``meta``."""
    handle = _fsdp_collectives._get_device_handle
    if not 1 <= processes <= MOST_PROCESSES:
        raise InputError("gpus", processes, f"1 to {MOST_PROCESSES}")
    if processes == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        with (
            patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None),
            patch.object(_fsdp_collectives, "_get_device_handle", lambda x: handle("cpu" if x == "meta" else x)),
        ):
            yield
    finally:
        dist.destroy_process_group()


def divide(backbone: Backbone) -> None:
    """Keep this process's share of a base only (`grade.models.sharding`), also on ``meta``."""
    backbone.shard(backbone.device)
    if backbone.device.type != "meta":
        return
    for module in backbone.decoder.modules():  # FSDP2 would gather into tensors with data
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            group.device = backbone.device
            for parameter in group.fsdp_params:
                parameter.device = backbone.device


@contextlib.contextmanager
def gathers_seen(tracker: LiveTracker) -> Iterator[None]:
    """Within this context a tracker counts gathered weights from when they come until they are freed."""

    def after(target: Any, name: str, note: Callable[[Any, tuple], None]) -> Any:
        original = getattr(target, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            note(result, args)
            return result

        return patch.object(target, name, noting)

    def resized(_: Any, args: tuple) -> None:
        tracker.resized(args[0], "gathered")

    def tagged(category: Category) -> Callable[[Any, tuple], None]:
        return lambda result, _: tracker.tag([result], category)

    with (
        after(_fsdp_param, "alloc_storage", resized),
        after(_fsdp_param_group, "alloc_storage", resized),
        after(_fsdp_param, "free_storage", resized),
        after(RowShards, "gather", tagged("gathered")),
        after(_fsdp_collectives.DefaultAllGather, "allocate", tagged("in transit")),
        after(_fsdp_param.FSDPParam, "init_all_gather_outputs",
              lambda _, args: tracker.tag(args[0].all_gather_outputs, "gathered")),
    ):  # fmt: skip
        yield
