"""Running code on tensors without data.

torch's meta kernels of elementwise operators are written in Python and take about 0.2 ms. A traced step calls the same
few hundred kernels tens of thousands of times, for every layer and token, and their outputs depend only on shapes,
strides and types. So they are cached: after the first call only the outputs are made. Fake tensors, which stand for CPU
tensors, go the same way, views of them too: torch's own cache of them takes five times as long.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from grade.memory.tracker import DispatchMode, facts, tensors_in

_MOST = 200_000
"""Calls that are remembered at most, some 100 MB; the trace of Experiment 4's start has 7,497."""

_outputs: dict[tuple, tuple[type | None, list] | None] = {}
"""How each call's outputs are made: the type that holds several, and shape, stride and type of each, or its value."""


class NoData(DispatchMode):
    """Lets code whose memory does not depend on data run on tensors without data.

    A check (``if finite``, ``if any alive``) is true and a step count is 1, as in a step without error; random numbers
    need no generator; copies to the CPU are zeros. Any other read of a value fails, because memory would then depend on
    data.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # noqa: D105
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].dtype == torch.bool:
                return True
            if args[0].dtype.is_floating_point:
                return 1.0
        if func in (torch.ops.aten.exponential_.default, torch.ops.aten.uniform_.default):
            return args[0]
        leaves = func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device") or "meta").type == "cpu"
        if leaves and args[0].device.type == "meta":
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return call_on_meta(func, args, kwargs)


def call_on_meta(func: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)``, cached if all tensors are on ``meta``, or all fake, and no output needs a computation.

    What the outputs of fake tensors are like is found on ``meta``. Calls that write to an argument, and views on
    ``meta``, which take little time, are computed each time; so are outputs that share a storage with another argument
    than the first, or with each other, or that have data.
    """
    known = facts(func)
    fake = next((tensor for tensor in tensors_in(args) if type(tensor) is FakeTensor), None)
    parts: list[Any] = [id(func), torch.get_default_dtype()]  # the latter: of an integer tensor times a float
    placed = fake is not None and kwargs.get("device") is not None  # elsewhere, it may be
    if placed or known.writes or (known.views and fake is None) or not _describe((*args, *kwargs.items()), parts):
        return func(*args, **kwargs)
    key = tuple(parts)
    if key not in _outputs:
        if len(_outputs) >= _MOST:
            _outputs.clear()
        if fake is None:
            result = func(*args, **kwargs)
            _outputs[key] = _recipe(result, args)
            return result
        with torch._C._DisableTorchDispatch():
            on_meta = _on_meta(args)
            _outputs[key] = _recipe(func(*on_meta, **kwargs), on_meta)
    if _outputs[key] is None:
        return func(*args, **kwargs)
    kind, recipes = _outputs[key]
    outputs = (_make(recipe, args, fake) if type(recipe) is tuple else recipe for recipe in recipes)
    return next(outputs) if kind is None else kind(outputs)


def _describe(values: Iterable[Any], parts: list[Any]) -> bool:
    """Append to ``parts`` everything that the outputs can depend on; False if there is a tensor with data."""
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            if not _is_plain(value):
                return False
            parts += (value.shape, value.stride(), value.dtype, value.storage_offset())
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _describe(value, parts):
                return False
        elif isinstance(value, torch._C.Generator):
            return False
        else:
            parts += (kind, value)  # 1, 1.0 and True are equal, but not alike
    return True


def _is_plain(tensor: Tensor) -> bool:
    kind = type(tensor)
    if kind is FakeTensor:
        return tensor.constant is None and tensor.layout == torch.strided
    return kind in (Tensor, torch.nn.Parameter) and tensor.is_meta and tensor.layout == torch.strided


def _on_meta(values: Iterable[Any]) -> tuple:
    """Fake tensors as tensors on ``meta`` with the same storages."""
    return tuple(
        list(_on_meta(value)) if isinstance(value, list | tuple)
        else _view(value, value.shape, value.stride(), value.dtype, value.storage_offset())
        if isinstance(value, Tensor) else value
        for value in values
    )  # fmt: skip


def _recipe(result: Any, args: tuple) -> tuple[type | None, list] | None:
    """How to make the outputs again; None if they have to be computed each time."""
    several = isinstance(result, tuple | list)
    recipes, storages = [], [tensor.untyped_storage()._cdata for tensor in tensors_in(args)]
    for value in result if several else (result,):
        if not isinstance(value, Tensor):
            if value is not None and not isinstance(value, int):
                return None
            recipes.append(value)
            continue
        storage, offset = value.untyped_storage(), None
        if not _is_plain(value) or isinstance(value, FakeTensor):
            return None
        if storage._cdata in storages:  # aten._unsafe_view and a few others return a view without saying so
            if value is args[0] or not isinstance(args[0], Tensor) or storage._cdata != storages[0]:
                return None
            offset = value.storage_offset()
        elif value.storage_offset():
            return None
        else:
            storages.append(storage._cdata)
        recipes.append((value.shape, value.stride(), value.dtype, offset))
        if offset is None and _make(recipes[-1], args, None).untyped_storage().nbytes() != storage.nbytes():
            return None
    return type(result) if several else None, recipes


def _make(recipe: tuple, args: tuple, fake: FakeTensor | None) -> Tensor:
    """An output: a view of the first argument if the recipe has an offset, and fake if an argument is: ``fake``."""
    shape, stride, dtype, offset = recipe
    if fake is None and offset is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    with torch._C._DisableTorchDispatch():
        if offset is None:
            data = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            data = _view(args[0], shape, stride, dtype, offset)
        return data if fake is None else FakeTensor(fake.fake_mode, data, fake.fake_device)


def _view(tensor: Tensor, shape: torch.Size, stride: tuple, dtype: torch.dtype, offset: int) -> Tensor:
    return torch.empty(0, dtype=dtype, device="meta").set_(tensor.untyped_storage(), offset, shape, stride)
