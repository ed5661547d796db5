"""What makes two rewards the same: hashes of code, weights and settings.

By them a text is scored only once, and a run that is resumed knows whether its reward's code has changed.

Not used: pickling (joblib's or datasets' hashes), which takes an imported function for its name.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from grade.errors import is_users
from grade.files import hashed, sha256_of
from grade.models.parameters import fingerprint
from grade.rewards.base import EmbeddingReward, Reward

_PLAIN = (bool, int, float, str, bytes, re.Pattern, torch.dtype, type(None))


def weights_hash(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of all elements of named tensors."""
    result = hashlib.sha256()
    for name, value in tensors.items():
        result.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        result.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return result.hexdigest()


class _Unknown(Exception):
    """An object of which not all is known."""


def identity(function: Any) -> str | None:
    """Hash of a function, a module or another callable object: its code, and what is bound to it.

    Code is a file with what it imports of the user's (`code_fingerprint`). Bound are a function's closure, an object's
    attributes, a module's weights. None where code has no file, as in a notebook, whose other cells are not seen, or
    where objects of other kinds are bound.
    """
    try:
        return hashed(list(_known(function, {})))
    except _Unknown:
        return None


def _known(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """All that is known of an object, part by part."""
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif id(value) in seen:  # a function that calls itself
        yield "again"
    else:
        seen[id(value)] = value
        for part in _parts(value):
            yield from _known(part, seen)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        return [weights_hash({"": value})]
    if isinstance(value, BaseModel):
        return [value.model_dump()]
    if isinstance(value, (list, tuple, dict)):
        items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
        return [f"{type(value).__name__} {len(value)}", *items]
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if inspect.ismethod(value):
        return value.__func__, value.__self__
    if inspect.isfunction(value):
        code, variables = value.__code__, inspect.getclosurevars(value).nonlocals
        if not Path(code.co_filename).is_file():
            raise _Unknown
        place = [code.co_qualname, list(code.co_positions())]
        written = hashed(sha256_of(Path(code.co_filename)), code_fingerprint(value), place)
        return written, dict(variables), value.__defaults__, value.__kwdefaults__
    if isinstance(value, nn.Module):  # weights, parts and hooks have names with an underscore
        own = [{name: v for name, v in vars(part).items() if not name.startswith("_")} for part in value.modules()]
        forwards = [type(part).forward for part in value.modules()]
        return weights_hash(value.state_dict()), *forwards, *own
    call = vars(type(value)).get("__call__")
    if not inspect.isfunction(call):
        raise _Unknown
    return call, vars(value)


def code_fingerprint(reward: str | Callable[..., Any]) -> dict[str, str]:
    """SHA-256 of a reward function's own file and of the user's files that it imports, directly or not, by path.

    The function is given by name or as an object. Paths are relative to its file's folder; the source of a function
    from a notebook's cell stands under its name. Imports are found in the text of the files, because importing a
    reward runs it; the standard library's modulefinder does not know packages without ``__init__.py``. Not seen:
    imports by a computed name, values that a function was made with, and files that it reads. Empty where there is no
    code of the user's, as for a classifier's name or a built-in function.
    """
    if isinstance(reward, str):
        where = "" if reward.startswith("hf:") else reward.rpartition(":")[0]
        own = [Path(where)] if where.endswith(".py") else []
    else:
        function = inspect.unwrap(reward.func if isinstance(reward, functools.partial) else reward)
        function = function if inspect.isroutine(function) else type(function)
        try:
            where, own = "", [Path(inspect.getsourcefile(function))]
            if not own[0].is_file():
                return {function.__qualname__: hashlib.sha256(inspect.getsource(function).encode()).hexdigest()}
        except (OSError, TypeError):  # typed into Python's prompt; compiled
            return {}
    folder = str(own[0].resolve().parent if own else Path.cwd())
    roots, found = [folder, *sys.path], dict[Path, None]()
    waiting = own or list(_files_of(where, roots))
    while waiting:
        path = waiting.pop().resolve()
        if path not in found and path.is_file() and is_users(str(path)):
            found[path] = None
            waiting += _imports(path, roots)
    return {os.path.relpath(path, folder): sha256_of(path) for path in sorted(found)}


def _imports(file: Path, roots: list[str]) -> Iterator[Path]:
    """Files of the modules that a file imports, anywhere in it; one that is not Python has none."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name, roots)
        elif isinstance(node, ast.ImportFrom):
            places = [str(place) for place in file.parents[node.level - 1 : node.level]] or roots
            for alias in node.names:  # which may be modules as well
                yield from _files_of(".".join(filter(None, (node.module, alias.name))), places)


def _files_of(module: str, roots: list[str]) -> Iterator[Path]:
    """A module's file and those of the packages around it, up to the first that is not the user's."""
    places = roots
    for part in filter(None, module.split(".")):
        spec = PathFinder.find_spec(part, places)  # without the packages' names, which would have to be imported
        if spec is None:
            return
        if spec.origin and spec.origin.endswith(".py"):
            if not is_users(spec.origin):
                return
            yield Path(spec.origin)
        if spec.submodule_search_locations is None:
            return
        places = list(spec.submodule_search_locations)


def fingerprint_of(reward: Reward, policy: Any) -> str | None:
    """A reward's fingerprint; of a function of embeddings that of the function, a module's weights among it, and base."""
    if not isinstance(reward, EmbeddingReward):
        return reward.fingerprint(policy)
    known, base = identity(reward.function), getattr(reward.function, "backbone", policy)
    if known is None or reward.reads is not None:
        return None
    return hashed(known, reward.scope, fingerprint(base.embedding if reward.kind == "bag" else base.model))
