"""Running code on tensors without data: on ``meta``, or fake ones.

torch's meta kernels of elementwise operators are written in Python and take about 0.2 ms. A traced step calls the same
few hundred kernels tens of thousands of times, for every layer and token, and their outputs depend only on shapes,
strides and types. So they are cached: after the first call only the outputs are made. (Fake tensors cache as well, and
take twice the time.)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from grade.memory.tracker import tensors_in
from grade.models.sharding import ShardedTable

_COMMUNICATION = ("c10d", "fsdp")
"""Namespaces of operators that do more than their outputs show: never cached."""
_MOST = 200_000
"""Calls that are remembered at most, some 100 MB; the trace of Experiment 4's start has 7,497."""

_outputs: dict[tuple, Any] = {}
_COMPUTE = object()  # an output that has to be computed each time
_FIRST_ARGUMENT = object()  # unchanged but for its contents


def has_data(tensor: Tensor) -> bool:
    """Whether a tensor has contents: it is neither on meta nor fake."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class NoData(TorchDispatchMode):
    """Lets code whose memory does not depend on data run on tensors without data.

    A check (``if finite``, ``if any alive``) is true and a step count is 1, as in a step without error; random numbers
    need no generator; copies to the CPU are zeros. Any other read of a value fails, because memory would then depend on
    data.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `grade.memory.tracker.MemoryTracker`

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if func.namespace in _COMMUNICATION:
            return func(*args, **kwargs)
        if ShardedTable in types:
            return NotImplemented  # it gathers its rows first
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return True
            if args[0].dtype.is_floating_point:
                return 1.0
        if func is torch.ops.aten.exponential_.default:
            return args[0]
        leaves = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
        if leaves and args[0].device.type == "meta":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return call_on_meta(func, args, kwargs)


def call_on_meta(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, cached if all tensors are on ``meta`` and all outputs are new tensors.

    Views, outputs that share a storage with an argument or with each other, and outputs elsewhere than on ``meta`` are
    computed each time. Of an operator in place, which changes contents alone, the output is the first argument.
    """
    kind = _kind(func)
    parts: list[Any] = [func]
    if kind == "other" or not _describe(args, parts):
        return func(*args, **kwargs)
    if kwargs:
        parts += kwargs
        if not _describe(kwargs.values(), parts):
            return func(*args, **kwargs)
    parts.append(torch.get_default_dtype())  # of an integer tensor times a float
    key = tuple(parts)
    try:
        known = _outputs.get(key)
    except TypeError:  # an argument that is not hashable: a generator
        return func(*args, **kwargs)
    if known is _FIRST_ARGUMENT:
        return args[0]
    if known is not None and known is not _COMPUTE:
        return _make(known)
    looks = _looks(args[0]) if kind == "in place" else None
    result = func(*args, **kwargs)
    if known is None:
        if len(_outputs) >= _MOST:
            _outputs.clear()
        if kind == "in place":
            unchanged = result is args[0] and _looks(result) == looks
            _outputs[key] = _FIRST_ARGUMENT if unchanged else _COMPUTE
        else:
            _outputs[key] = _recipe(result, args)
    return result


@cache
def _kind(func: OpOverload) -> str:
    """``new``: nothing is shared or written; ``in place``: one tensor is written and returned; ``other``."""
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = [value.alias_info for value in (*arguments, *returns)]
    if not any(aliases):
        return "new"
    first, others, last = aliases[0], aliases[1:-1], aliases[-1]
    alone = len(returns) == 1 and first and last and first.is_write and last.is_write and not any(others)
    return "in place" if alone and arguments[0].type.isSubtypeOf(torch._C.TensorType.get()) else "other"


def _looks(tensor: Tensor) -> tuple:
    """Everything of a tensor on ``meta`` but what it is called."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes()


def _describe(values: Any, parts: list[Any]) -> bool:
    """Append to ``parts`` everything that the outputs can depend on; False if there is a tensor with data."""
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            if not value.is_meta or kind not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided:
                return False
            parts += (value.shape, value.stride(), value.dtype)
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _describe(value, parts):
                return False
        elif kind is torch.Generator:
            parts.append(kind)  # it changes contents alone, and cannot be hashed
        else:
            parts += (kind, value)  # 1, 1.0 and True are equal, but not alike
    return True


def _recipe(result: Any, args: tuple) -> Any:
    """Shape, stride and type of each output, for `_make`; or `_COMPUTE`."""
    several = isinstance(result, tuple | list)
    values = result if several else (result,)
    recipes = []
    for value in values:
        if value is None or isinstance(value, int):
            recipes.append((value,))
            continue
        if type(value) is not Tensor or not value.is_meta or value.layout != torch.strided:
            return _COMPUTE
        recipe = (value.shape, value.stride(), value.dtype)
        if _make_one(recipe).untyped_storage().nbytes() != value.untyped_storage().nbytes() or value.storage_offset():
            return _COMPUTE
        recipes.append(recipe)
    # aten._unsafe_view and a few others return a view without saying so
    outputs = [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]
    inputs = {value.untyped_storage()._cdata for value in tensors_in(args)}
    if len(set(outputs)) < len(outputs) or not inputs.isdisjoint(outputs):
        return _COMPUTE
    return type(result) if several else None, recipes


def _make(known: tuple[type | None, list[tuple]]) -> Any:
    kind, recipes = known
    return _make_one(recipes[0]) if kind is None else kind(_make_one(recipe) for recipe in recipes)


def _make_one(recipe: tuple) -> Any:
    if len(recipe) == 1:
        return recipe[0]
    shape, stride, dtype = recipe
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
