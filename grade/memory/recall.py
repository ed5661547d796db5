"""A cache of operators on ``meta`` tensors: their outputs depend only on shapes, strides and types.

torch's meta kernels of elementwise operators are written in Python and take about 0.2 ms. A traced step calls the same
few hundred kernels tens of thousands of times, for every layer and token. After the first call only the outputs are
made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from grade.memory.tracker import tensors_in

_MOST = 200_000
"""Calls that are remembered at most, some 100 MB; the trace of Experiment 4's start has 7,497."""

_kinds: dict[OpOverload, str] = {}
_made: dict[tuple, Any] = {}
_NEVER = object()  # stands for an output that has to be computed each time
_ITSELF = object()  # stands for the first argument, unchanged but for its contents


class _New(NamedTuple):
    """A new tensor on ``meta``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def call_on_meta(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, cached if all tensors are on ``meta`` and all outputs are new tensors.

    Args:
        func: The operator.
        args: Its arguments: tensors, numbers, types, and lists of them.
        kwargs: Its named arguments.

    Returns:
        What the operator returns. Views, outputs that share a storage with an argument or with each other, and outputs
        elsewhere than on ``meta`` are computed each time. Of an operator in place, which changes contents alone, it is
        the first argument.
    """
    kind = _kinds.get(func)
    if kind is None:
        kind = _kinds[func] = _kind(func)
    parts: list[Any] = [func]
    if kind == "other" or not _describe(args, parts) or (kwargs and not _describe_named(kwargs, parts)):
        return func(*args, **kwargs)
    parts.append(torch.get_default_dtype())  # of an integer tensor times a float
    key = tuple(parts)
    try:
        made = _made.get(key)
    except TypeError:  # an argument that is not hashable: a generator
        return func(*args, **kwargs)
    if made is None:
        looks = _looks(args[0]) if kind == "in place" else None
        result = func(*args, **kwargs)
        if len(_made) >= _MOST:
            _made.clear()
        if kind == "in place":
            _made[key] = _ITSELF if result is args[0] and _looks(result) == looks else _NEVER
        else:
            _made[key] = _recipe(result, args)
        return result
    if made is _ITSELF:
        return args[0]
    if made is _NEVER:
        return func(*args, **kwargs)
    return _make(made)


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


def _describe_named(kwargs: dict[str, Any], parts: list[Any]) -> bool:
    parts += kwargs
    return _describe(kwargs.values(), parts)


def _recipe(result: Any, args: tuple) -> Any:
    """The recipe from which `_make` makes the same outputs, or `_NEVER`."""
    several = isinstance(result, tuple | list)
    values = result if several else (result,)
    parts = [_recipe_of_one(value) for value in values]
    if any(part is _NEVER for part in parts) or _share_storage(values, args):
        return _NEVER
    return (type(result), parts) if several else parts[0]


def _recipe_of_one(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    if type(value) is not Tensor or not value.is_meta or value.layout != torch.strided:
        return _NEVER
    made = _New(value.shape, value.stride(), value.dtype)
    exact = _make(made).untyped_storage().nbytes() == value.untyped_storage().nbytes()
    return made if exact and value.storage_offset() == 0 else _NEVER


def _share_storage(result: Any, args: tuple) -> bool:
    """``aten._unsafe_view`` and a few others return a view without saying so."""
    outputs = [value.untyped_storage()._cdata for value in result if isinstance(value, Tensor)]
    inputs = {value.untyped_storage()._cdata for value in tensors_in(args)}
    return len(set(outputs)) < len(outputs) or not inputs.isdisjoint(outputs)


def _make(made: Any) -> Any:
    if type(made) is _New:
        return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
    if type(made) is tuple:
        kind, parts = made
        return kind(_make(part) for part in parts)
    return made
