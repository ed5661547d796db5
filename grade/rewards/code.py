"""The code behind a reward function, as hashes: has it changed since a run began, or since a text was scored?"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from grade.errors import is_users
from grade.files import sha256_of


def code_fingerprint(reward: str | Callable[..., Any]) -> dict[str, str]:
    """SHA-256 of a reward function's own file and of the user's files that it imports, directly or not.

    The function is given by name or as an object. Paths are relative to its file's folder; the source of a function
    from a notebook's cell stands under its name. Imports are found in the text of the files, because importing a
    reward runs it; the standard library's modulefinder does not know packages without ``__init__.py``. Not seen:
    imports by a computed name, values that a function was made with, and files that it reads.

    Returns:
        By path; empty where there is no code of the user's, as for a classifier's name or a built-in function.
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
