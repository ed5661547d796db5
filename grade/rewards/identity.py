"""What makes two rewards the same: hashes of code, weights and settings, so that a text need be scored only once.

Not used: pickling (joblib's or datasets' hashes), which takes an imported function for its name.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from grade.files import sha256_of
from grade.rewards.code import code_fingerprint

_PLAIN = (bool, int, float, str, bytes, re.Pattern, torch.dtype, type(None))


def hashed(*parts: Any) -> str:
    """SHA-256 of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def weights_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of all elements of named tensors."""
    result = hashlib.sha256()
    for name, value in tensors.items():
        result.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        result.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return result.hexdigest()


def identity(function: Any) -> str | None:
    """Hash of a function, a module or another callable object: its code, and what is bound to it.

    Code is a file with what it imports of the user's (`code_fingerprint`). Bound are a function's closure, an object's
    attributes, a module's weights. None where code has no file, as in a notebook, whose other cells are not seen, or
    where objects of other kinds are bound.
    """
    known = _Known()
    return hashed(known.parts) if known.add(function) else None


class _Known:
    """Collects what is known of an object; `add` says whether that is all."""

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self._seen: dict[int, Any] = {}

    def add(self, value: Any) -> bool:
        if isinstance(value, _PLAIN):
            self.parts.append(repr(value))
            return True
        if id(value) in self._seen:  # a function that calls itself
            self.parts.append("again")
            return True
        self._seen[id(value)] = value
        return self._add_parts(value)

    def _add_parts(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self.add(weights_hash({"": value}))
        if isinstance(value, BaseModel):
            return self.add(value.model_dump())
        if isinstance(value, (list, tuple, dict)):
            items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
            return self.add(f"{type(value).__name__} {len(value)}") and all(map(self.add, items))
        if isinstance(value, functools.partial):
            return self.add((value.func, value.args, value.keywords))
        if inspect.ismethod(value):
            return self.add((value.__func__, value.__self__))
        if inspect.isfunction(value):
            return self._add_function(value)
        if isinstance(value, nn.Module):
            modules = [(type(part).forward, _attributes(part)) for part in value.modules()]
            return self.add((weights_hash(value.state_dict()), *modules))
        call = vars(type(value)).get("__call__")
        return inspect.isfunction(call) and self.add((call, vars(value)))

    def _add_function(self, function: Any) -> bool:
        code, variables = function.__code__, inspect.getclosurevars(function).nonlocals
        if not Path(code.co_filename).is_file():
            return False
        place = [code.co_qualname, list(code.co_positions())]
        self.parts.append([sha256_of(Path(code.co_filename)), code_fingerprint(function), place])
        return self.add((dict(variables), function.__defaults__, function.__kwdefaults__))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Settings of a module; weights, parts and hooks are elsewhere."""
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}
