"""Files and folders that replace what was there as a whole, and JSON."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grade.errors import InputError


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a new path beside ``path``, with the same ending, for a file or a folder; afterwards rename it to ``path``.

    Readers see the old content or all of the new one; after an error the old content stands.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    staging, old = (path.with_name(f".{os.getpid()}{kind}.{path.name}") for kind in ("", "-old"))
    try:
        yield staging
        if path.is_dir():
            os.rename(path, old)
        os.replace(staging, path)
    except BaseException:
        remove(staging)
        raise
    remove(old)


def write_text(path: str | Path, text: str) -> None:
    """Replace a file's content in one step; see `atomic`."""
    with atomic(path) as staging:
        staging.write_text(text, encoding="utf-8", newline="")


def write_json(path: str | Path, content: Any, indent: int = 1, sort_keys: bool = False) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(content, indent=indent, sort_keys=sort_keys) + "\n")


def read_json(path: str | Path) -> Any:
    """What a file of JSON holds."""
    return json.loads(Path(path).read_text(encoding="utf-8"))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_STAGES = {"models/backbone": "backbone", "models/tiny": "pretrain"}
_FOLDERS = ("models", "data", "outputs", "runs")
"""Models that the pipeline makes, with their stages, and folders that are no owners on the hub."""


def require_source(field: str, name: str, allowed: str) -> None:
    """Refuse what is neither here nor ``owner/name`` of the hub, which would be asked for it five times."""
    owner = name.partition("/")[0]
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and owner not in _FOLDERS and not name.endswith(".json")
    if on_hub or os.path.exists(name):
        return
    folder = Path(name).parent
    beside = [str(folder / entry) for entry in os.listdir(folder)] if os.path.isdir(folder) else []
    close = difflib.get_close_matches(name, {*_STAGES, *beside}, n=1)
    hint = f"; run `dvc repro {_STAGES[name]}`" if name in _STAGES else f"; did you mean {close[0]!r}?" if close else ""
    raise InputError(field, name, f"{allowed} (no folder {name[:120]}; a hub id is owner/name{hint})")
