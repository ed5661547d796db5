"""Running code on tensors without data: on meta, or fake ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from grade.memory.recall import call_on_meta
from grade.models.sharding import ShardedTable

_NOT_CACHED = ("c10d", "fsdp")
"""Operators of communication, which do more than their outputs show."""


class NoData(TorchDispatchMode):
    """Lets code whose memory does not depend on data run on tensors without data (meta or fake).

    A check (``if finite``, ``if any alive``) is true and a step count is 1, as in a step without error; random numbers
    need no generator; copies to the CPU are zeros. Any other read of a value fails, because memory would then depend on
    data.

    Outputs of operators on ``meta`` tensors are cached (`grade.memory.recall`).
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `grade.memory.tracker.MemoryTracker`

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        if func.namespace in _NOT_CACHED:
            return func(*args, **(kwargs or {}))
        if ShardedTable in types:
            return NotImplemented  # it gathers its rows first
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return True
            if args[0].dtype.is_floating_point:
                return 1.0
        if func is torch.ops.aten.exponential_.default:
            return args[0]
        kwargs = kwargs or {}
        leaves = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
        if leaves and args[0].device.type == "meta":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return call_on_meta(func, args, kwargs)


def has_data(tensor: torch.Tensor) -> bool:
    """Whether a tensor has contents: it is neither on meta nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))
