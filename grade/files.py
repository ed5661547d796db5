"""Files and folders that a command writes: checked before it computes, one writer at a time, whole or not there.

What must survive a kill is made beside its place and renamed into it (`atomic`). Not used: atomicwrites, which is
not maintained and knows no folders.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from grade.errors import InputError, reading, require_file

OPTION = "--output-dir"
MANIFEST = "manifest.json"
LOCK = ".lock"
_KEPT = ("lost+found", ".gitignore", ".gitkeep")
"""Names that a file system or git puts into empty folders; they stay where they are."""

_STAGES = {"models/backbone": "backbone", "models/tiny": "pretrain"}
_FOLDERS = ("models", "data", "outputs", "runs")
"""Models that the pipeline makes, with their stages, and folders that are no owners on the hub."""


def require_source(field: str, name: str, allowed: str, known: Iterable[str] = ()) -> None:
    """Refuse what is neither here nor ``owner/name`` of the hub, which is asked for nothing else: it tries five times.

    ``known``: names that would do as well, for a hint.
    """
    owner = name.partition("/")[0]
    on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and owner not in _FOLDERS and not name.endswith(".json")
    if on_hub or os.path.exists(name):
        return
    folder = Path(name).parent
    beside = [str(folder / entry) for entry in os.listdir(folder)] if os.path.isdir(folder) else []
    close = difflib.get_close_matches(name, {*known, *_STAGES, *beside}, n=1)
    hint = f"; run `dvc repro {_STAGES[name]}`" if name in _STAGES else f"; did you mean {close[0]!r}?" if close else ""
    raise InputError(field, name, f"{allowed} (no folder {name[:120]}; a hub id is owner/name{hint})")


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a new path beside ``path``, with the same ending, for a file or a folder; afterwards rename it to ``path``.

    Readers see the old content or all of the new one. After an error nothing is left of the new one; what a killed
    process left is removed by the next one that writes to ``path``. Only a folder that takes the place of another is
    two renames: a process killed between them leaves none, and the next one puts the old folder back.
    """
    path = Path(path)
    if path.is_dir():
        path = path.resolve()  # a link to a folder stays a link; one to a file, such as DVC's cache, is replaced
    elif path.exists() and not path.is_file():
        raise InputError("output", str(path), "a file: not a device or a pipe")
    path.parent.mkdir(parents=True, exist_ok=True)
    _clean(path)
    staging, old = (path.with_name(f".{os.getpid()}{kind}.{path.name}") for kind in ("", "-old"))
    try:
        yield staging
        if path.is_dir():
            os.rename(path, old)
        os.replace(staging, path)
    except BaseException as error:
        if old.exists() and not path.exists():
            os.rename(old, path)
        remove(staging)
        name_file(error, path)
        raise
    remove(old)


def name_file(error: BaseException, path: Path) -> None:
    """Give an error of the system the file that it does not name, such as that of a full disk."""
    if isinstance(error, OSError) and error.errno and error.filename is None:
        error.filename = str(path)


def write_text(path: str | Path, text: str) -> None:
    """Replace a file's content in one step; see `atomic`. What is in a folder of that name is not lost."""
    if Path(path).is_dir():
        raise InputError("output", str(path), "a file: not a folder")
    with atomic(path) as staging:
        staging.write_text(text, encoding="utf-8", newline="")


def write_json(path: str | Path, content: Any, indent: int = 1, sort_keys: bool = False) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(content, indent=indent, sort_keys=sort_keys) + "\n")


def read_json(path: str | Path) -> Any:
    """What a file of JSON holds."""
    return json.loads(require_file(path).read_text(encoding="utf-8"))


def write_manifest(folder: Path, names: Iterable[str] | None = None) -> None:
    """Write down size and SHA-256 of a folder's files, all but texts for people (``.md``) or these: its last file.

    And of the list itself: one that omits a file is damaged.
    """
    if names is None:
        names = [str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file() and p.suffix != ".md"]
    content = {name: _size_and_sha256(folder / name) for name in names if name != MANIFEST}
    write_json(folder / MANIFEST, content | {MANIFEST: hashed(content)})


def damaged_file(folder: Path, names: Iterable[str] = ("*",)) -> str | None:
    """The first file of a folder that is not what its manifest says, or the manifest itself; None: all are whole.

    ``names``: of these only, as patterns of `fnmatch`.
    """
    content = read_manifest(folder)
    if (own := content.pop(MANIFEST, None)) and own != hashed(content):  # earlier versions wrote none
        return MANIFEST
    for name, about in content.items():
        if any(fnmatchcase(name, kind) for kind in names) and _size_and_sha256(folder / name) != about:
            return name
    return None if content else MANIFEST


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a folder's manifest says; nothing where there is none that can be read."""
    try:
        return dict(read_json(folder / MANIFEST))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def check_whole(folder: Path, field: str, names: Iterable[str] = ("*",)) -> None:
    """Reject a folder with a file, of these or of all, that is not what its manifest says; others write no manifest."""
    if (folder / MANIFEST).exists() and (damaged := damaged_file(folder, names)):
        raise InputError(field, str(folder), f"a folder that is what its {MANIFEST} says; {damaged} is damaged")


def checkpoints_of(run: Path) -> list[Path]:
    """A run's folders of checkpoints, the oldest first; what else begins like one is the user's."""
    found = {path: re.fullmatch("checkpoint-([1-9][0-9]*)", path.name) for path in run.glob("checkpoint-*/")}
    return sorted((path for path, match in found.items() if match), key=lambda path: int(found[path][1]))


def hashed(*parts: Any) -> str:
    """SHA-256 of values, in hexadecimal: of their JSON, and of the text of what JSON cannot hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """A file's hash, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size_and_sha256(path: Path) -> list[int | str]:
    return [path.stat().st_size, sha256_of(path)] if path.is_file() else []


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _clean(path: Path) -> None:
    """Remove what killed processes left beside a path, or put it back where the new content never came."""
    with suppress(FileNotFoundError):
        for name in os.listdir(path.parent):
            match = re.fullmatch(rf"\.(\d+)(-old)?\.{re.escape(path.name)}", name)
            if match and (int(match[1]) == os.getpid() or not _is_alive(int(match[1]))):
                if match[2] and not path.exists():
                    os.rename(path.with_name(name), path)
                else:
                    remove(path.with_name(name))


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):  # somebody else's
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return True


class OutputFolder:
    """A folder that this process holds; see `claimed`."""

    def __init__(self, path: Path, writes: Sequence[str], option: str) -> None:
        self.path, self.writes, self.option = path, tuple(writes), option

    @contextmanager
    def replacement(self) -> Iterator[Path]:
        """Yield an empty folder; when the block ends without an error, it takes the place of the earlier result."""
        with atomic(self.path) as staging:
            staging.mkdir()
            yield staging
            self.check_foreign()  # a computation takes hours, in which someone may have put something here
            for name in _KEPT:
                if (self.path / name).is_file() and not (staging / name).exists():
                    shutil.copy2(self.path / name, staging / name)

    def check_foreign(self) -> None:
        """Reject anything in the folder that the command does not write."""
        for name in sorted(os.listdir(self.path)) if self.path.exists() else ():
            if name not in (LOCK, *_KEPT) and not self._wrote(name):
                earlier = "or has nothing but an earlier result in it, " if self.writes else ""
                allowed = f"a folder that does not exist yet, or is empty, {earlier}not {name!r}"
                raise InputError(self.option, str(self.path), allowed)

    def _wrote(self, name: str) -> bool:
        place = self.path / name  # a link may stand for either
        kinds = ("", "/") if place.is_symlink() else ("/",) if place.is_dir() else ("",)
        return any(fnmatchcase(name + kind, pattern) for pattern in self.writes for kind in kinds)


@contextmanager
def claimed(
    folder: str | Path, writes: Sequence[str], *, inputs: Iterable[str | Path] = (), option: str = OPTION,
    shared: bool = False,
) -> Iterator[OutputFolder]:  # fmt: skip
    """Hold a command's output folder, from before it computes until it has written.

    ``writes`` are names that the command writes there, as patterns of `fnmatch`; those of folders end in "/". With
    ``shared``, others write there as well, and their files are left alone. ``inputs`` are what the command reads; what
    is no existing path is ignored. The lock goes with the process, however that ends. Folders that this made, and in
    which nothing was written, are removed at the end. `InputError` names ``option`` if the folder is the working folder
    or one around it or around an input, is no folder, is held by another run, cannot be written, or has other files.
    """
    path = _resolved(folder, option)
    output = OutputFolder(path, writes, option)
    with writing(folder, option):
        _check_place(path, inputs, option)
        _clean(path)
        if not shared:
            output.check_foreign()
    place = path.with_name(f".{path.name}{LOCK}")
    if path.is_dir() and (path.is_mount() or not os.access(path.parent, os.W_OK)):
        if not shared:
            raise InputError(option, str(folder), "a folder that can be renamed, such as a new one in this one")
        place = path / LOCK
    with _made(place.parent, writing(folder, option)):
        lock = FileLock(place)
        with writing(folder, option):
            place.touch()  # what cannot be written would look like a lock that another holds
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise InputError(option, str(folder), "a folder that no other run is writing to") from None
        try:
            yield output
        finally:
            with suppress(OSError):
                place.unlink(missing_ok=True)  # while it is held: nobody else's is removed
            lock.release()


def check_file(path: str | Path, option: str, ending: str = ".json") -> None:
    """Reject a file that cannot be written, before anything is computed. What that needs is made and removed again.

    So is a file that is no earlier result: one of another kind, one that a manifest lists, as those of runs, or one
    beside a model's weights.
    """
    target = _resolved(path, option)
    if target.exists() and not target.is_file():
        raise InputError(option, str(path), "a file: not a folder, a device or a pipe")
    if target.exists() and target.suffix != ending:
        raise InputError(option, str(path), f"a new file, or an earlier one whose name ends in {ending}")
    for folder in target.parents:
        if str(target.relative_to(folder)) in read_manifest(folder):
            raise InputError(option, str(path), f"another file: {folder / MANIFEST} lists this one")
    if target.exists() and any(target.parent.glob("*.safetensors")):
        raise InputError(option, str(path), "a new file, or one in a folder without a model")
    with _made(target.parent, writing(path, option, "file")), writing(path, option, "file"):
        trial = target.with_name(f".{os.getpid()}.{target.name}")
        trial.touch()  # root may write anywhere, says os.access
        trial.unlink()


def check_apart(outputs: Mapping[str, str | Path | None]) -> None:
    """Reject a file that is another output, or in which another would lie; outputs by option, of which one is a folder.

    No file may lie in the folder either, which is replaced as a whole. ``None`` is not written.
    """
    places = {option: _resolved(path, option) for option, path in outputs.items() if path is not None}
    for option, place in places.items():
        for other in places.keys() - {option}:
            if option != OPTION and place in (places[other], *places[other].parents):
                raise InputError(option, str(outputs[option]), f"another file than {other}, and no folder around it")
            if other == OPTION and places[other] in place.parents:
                raise InputError(option, str(outputs[option]), f"a file outside {other}")


def writing(place: str | Path, option: str = OPTION, kind: str = "folder") -> AbstractContextManager[None]:
    """Name the option where something cannot be written."""
    return reading(option, place, f"a {kind} that can be written", OSError)


def _resolved(path: str | Path, option: str) -> Path:
    with reading(option, path, "a path"):  # no circle of links, no null byte
        return Path(path).resolve()


def _check_place(path: Path, inputs: Iterable[str | Path], option: str) -> None:
    here = Path.cwd()
    if path == here or path in here.parents:
        raise InputError(option, str(path), "another folder than the working folder and those around it")
    for name in inputs:
        try:
            place = Path(name).resolve()
            exists = place.exists()
        except (OSError, RuntimeError, ValueError):
            continue  # not a path, but an id or a function
        if exists and (path == place or path in place.parents):
            raise InputError(option, str(path), f"another folder than the input {name} and those around it")
    if path.exists() and not path.is_dir():
        allowed = "a folder that does not exist yet, or is empty: not a file, a device or a pipe"
        raise InputError(option, str(path), allowed)


@contextmanager
def _made(folder: Path, naming: AbstractContextManager) -> Iterator[None]:
    """Make a folder with those around it; at the end remove those of them that are still empty."""
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with naming:
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):
            for place in new:
                place.rmdir()
