"""One process of several that train together, traced alone or run for real.

With ``ddp`` each process holds everything and sums the adapter's gradients with the others; with ``fsdp2`` it holds its
share of the base (`grade.models.sharding`) and gathers layers, embedding table and head. In a trace the others do not
exist: torch's ``fake`` process group does nothing in a collective operation, so that what is left is what this process
allocates, by the code that runs in training: gathered layers, the next one on its way while one computes, and buffers.

torch's FSDP2 resizes storages without an operator, so a tracker is told of it here. Left out: buffers of the
communication library itself, and what a gradient's sum needs within it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group

from grade.errors import InputError
from grade.memory.live import LiveTracker
from grade.models.backbone import Backbone
from grade.models.sharding import RowShards

Sharding = Literal["fsdp2", "ddp"]
"""How processes share a base: each has a part, or each has a copy."""


@contextlib.contextmanager
def alone_among(processes: int) -> Iterator[None]:
    """Within this context this process is the first of several that do not exist.

    Args:
        processes: W; 1: nothing is done.

    Raises:
        InputError: If W < 1.
    """
    if processes < 1:
        raise InputError("gpus", processes, "at least 1")
    if processes == 1:
        yield
        return
    import torch.distributed._tools.fake_collectives  # noqa: F401 - collective operations on meta
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def divide(backbone: Backbone) -> None:
    """Keep this process's share of a base only; see `grade.models.sharding`.

    Args:
        backbone: On a device, on meta or fake; changed in place.
    """
    backbone.shard(backbone.device)
    if backbone.device.type != "meta":
        return
    for module in backbone.decoder.modules():  # FSDP2 has no meta: it would gather into tensors with data
        for group in module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else ():
            group.device = backbone.device
            for parameter in group.fsdp_params:
                parameter.device = backbone.device


def sum_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sum gradients over processes, one by one, as training does; nothing where there is one process.

    Args:
        optimizer: Whose parameters' gradients are replaced.
    """
    if not dist.is_initialized():
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad = p.grad.clone()
                dist.all_reduce(p.grad)


@contextlib.contextmanager
def gathers_seen(tracker: LiveTracker) -> Iterator[None]:
    """Within this context a tracker counts gathered weights from when they come until they are freed.

    Args:
        tracker: Is told what is allocated and freed, and what it is for.
    """
    alloc, free, gather = _fsdp_param.alloc_storage, _fsdp_param.free_storage, RowShards.gather
    first, allocate = _fsdp_param.FSDPParam.init_all_gather_outputs, _fsdp_collectives.DefaultAllGather.allocate
    handle = _fsdp_collectives._get_device_handle

    def allocating(tensor: Tensor) -> None:
        alloc(tensor)
        tracker.resized(tensor, "gathered")

    def freeing(tensor: Tensor) -> None:
        free(tensor)
        tracker.resized(tensor, "gathered")

    def beginning(parameter: Any, *args: Any) -> None:
        first(parameter, *args)
        tracker.tag(parameter.all_gather_outputs, "gathered")

    def gathering(rows: RowShards) -> Tensor:
        everything = gather(rows)
        tracker.tag([everything], "gathered")
        return everything

    def buffering(*args: Any, **kwargs: Any) -> Tensor:
        buffer = allocate(*args, **kwargs)
        tracker.tag([buffer], "in transit")
        return buffer

    def streams(kind: str) -> Any:
        return handle("cpu" if kind == "meta" else kind)

    with contextlib.ExitStack() as stack:
        for target, name, new in (
            (_fsdp_param, "alloc_storage", allocating), (_fsdp_param_group, "alloc_storage", allocating),
            (_fsdp_param, "free_storage", freeing), (RowShards, "gather", gathering),
            (_fsdp_param.FSDPParam, "init_all_gather_outputs", beginning),
            (_fsdp_collectives.DefaultAllGather, "allocate", buffering),
        ):  # fmt: skip
            stack.enter_context(patch.object(target, name, new))
        # FSDP2 refuses weights on meta, as they would have to be filled before they are trained; meta has no streams.
        stack.enter_context(patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda _: None))
        stack.enter_context(patch.object(_fsdp_collectives, "_get_device_handle", streams))
        yield
