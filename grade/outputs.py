"""Folders and files that a command writes: checked before it computes, one writer at a time, replaced whole.

A folder is staged inside itself, so it may be a mounted volume or a link to another disk. Only names that the command
itself writes are ever moved or deleted. The new result is complete before the first old file moves. A failed move is
undone; what a killed process left half done is undone or finished by the next one that holds the folder.

Left out: file systems without ``flock``, on which no second writer could be kept out.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from grade.errors import InputError

OPTION = "--output-dir"
LOCK = ".lock"
_STAGING, _READY, _LEAVING, _REPLACED = ".staging", ".ready", ".leaving", ".replaced"
_OWN = (LOCK, _STAGING, _READY, _LEAVING, _REPLACED)
_NOBODYS = ("lost+found", ".gitignore", ".gitkeep")
"""Names that a file system or git puts into empty folders; they stay where they are."""


class OutputFolder:
    """A folder that this process holds.

    Args:
        path: The folder, without links.
        given: The folder as the user named it.
        writes: Patterns of names that the command writes there, see `claimed`.
        option: The option that named it.
        shared: Whether others write there as well.
    """

    def __init__(
        self, path: Path, given: str | Path, writes: Sequence[str], option: str = OPTION, shared: bool = False
    ) -> None:
        self.path, self.given, self.writes, self.option, self.shared = path, str(given), tuple(writes), option, shared

    @contextmanager
    def replacement(self) -> Iterator[Path]:
        """Replace what an earlier run wrote.

        Yields:
            An empty folder to write to, inside the output. When the block ends without an error, everything in it takes
            the place of the earlier result.

        Raises:
            InputError: If the folder cannot be written; the earlier result then stands, or the new one does.
        """
        staging = self.path / _STAGING
        with writing(self.given, self.option):
            try:
                staging.mkdir(parents=True)
                yield staging
                self.check_foreign()  # a computation takes hours, in which someone may have put something here
                self._commit()
            except BaseException:
                with suppress(OSError):
                    self.recover()
                raise

    def check_foreign(self) -> None:
        """Reject anything in the folder that the command does not write, unless it is shared.

        Raises:
            InputError: Naming the first of them.
        """
        if self.shared or not self.path.exists():
            return
        for name in sorted(os.listdir(self.path)):
            if name not in (*_OWN, *_NOBODYS) and not self._wrote(name):
                earlier = "or has nothing but an earlier result in it, " if self.writes else ""
                allowed = f"a folder that does not exist yet, or is empty, {earlier}not {name!r}"
                raise InputError(self.option, self.given, allowed)

    def recover(self) -> None:
        """Undo or finish what an interrupted replacement left. Without the lock, it could be another run's."""
        staging, ready, leaving, replaced = (self.path / n for n in (_STAGING, _READY, _LEAVING, _REPLACED))
        _remove(staging)
        if leaving.exists():  # the earlier result was being moved out: it goes back
            _move_all(leaving, self.path)
        if replaced.exists():  # all of it was out: the new one is finished
            if ready.exists():
                _move_all(ready, self.path)
            _remove(replaced)
        _remove(ready)

    def _commit(self) -> None:
        staging, ready, leaving, replaced = (self.path / n for n in (_STAGING, _READY, _LEAVING, _REPLACED))
        os.rename(staging, ready)
        leaving.mkdir()
        for name in sorted(os.listdir(self.path)):
            if name not in _OWN and self._wrote(name):
                os.rename(self.path / name, leaving / name)
        os.rename(leaving, replaced)  # from here on the new result is finished, never undone
        _move_all(ready, self.path)
        _remove(replaced)

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

    The lock goes with the process, however that ends. What an interrupted run left is cleaned up. Folders that this
    made, and in which nothing was written, are removed at the end.

    Args:
        folder: The output; it is made.
        writes: Names that the command writes in it, as patterns of `fnmatch`; those of folders end in "/". A folder
            with other names is refused.
        inputs: What the command reads; what is no existing path is ignored.
        option: The option that names the folder, for messages.
        shared: Others write there as well; their files are left alone.

    Yields:
        The folder.

    Raises:
        InputError: If it is the working folder, a folder around that or around an input, no folder, held by another
            run, not writable, or has other files in it.
    """
    path = _resolved(folder, option)
    output = OutputFolder(path, folder, writes, option, shared)
    _check_place(path, folder, inputs, option)
    made: list[Path] = []
    try:
        with writing(folder, option):
            output.check_foreign()
            _make(path, made)
            lock = _lock(path, folder, option)
        try:
            with writing(folder, option):
                output.recover()
            yield output
        finally:
            with suppress(OSError):
                (path / LOCK).unlink(missing_ok=True)  # while it is held: nobody else's is removed
            os.close(lock)
    finally:
        _unmake(made)


@contextmanager
def writing(place: str | Path, option: str = OPTION, kind: str = "folder") -> Iterator[None]:
    """Name the option where something cannot be written.

    Args:
        place: The output.
        option: The option that names it.
        kind: What it is: folder or file.

    Raises:
        InputError: In place of an error of the operating system, also of one that a library written in Rust passes on.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not re.search(r"\(os error \d+\)", str(error)):
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise InputError(option, str(place), f"a {kind} that can be written ({reason})") from error


def check_file(path: str | Path, option: str) -> None:
    """Reject a file that cannot be written, before anything is computed. What that needs is made and removed again.

    Args:
        path: The file.
        option: The option that names it.

    Raises:
        InputError: If it is a folder, a device or a pipe, or its folder cannot be written or made.
    """
    target = _resolved(path, option)
    made: list[Path] = []
    with writing(path, option, "file"):
        if target.exists() and not target.is_file():
            raise InputError(option, str(path), "a file: not a folder, a device or a pipe")
        trial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            _make(target.parent, made)
            os.close(os.open(trial, os.O_WRONLY | os.O_CREAT, 0o666))  # root may write anywhere, says os.access
            trial.unlink()
        finally:
            _unmake(made)


def _resolved(path: str | Path, option: str) -> Path:
    try:
        return Path(path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a null byte
        raise InputError(option, str(path), f"a path ({error})") from None


def _check_place(path: Path, given: str | Path, inputs: Iterable[str | Path], option: str) -> None:
    here = Path.cwd()
    if path == here or path in here.parents:
        raise InputError(option, str(given), "another folder than the working folder and those around it")
    for name in inputs:
        try:
            place = Path(name).resolve()
            found = place.exists()
        except (OSError, RuntimeError, ValueError):
            continue  # not a path, but an id or a function
        if found and (path == place or path in place.parents):
            raise InputError(option, str(given), f"another folder than the input {name} and those around it")
    with writing(given, option):
        if path.exists() and not path.is_dir():
            allowed = "a folder that does not exist yet, or is empty: not a file, a device or a pipe"
            raise InputError(option, str(given), allowed)


def _make(path: Path, made: list[Path]) -> None:
    for parent in (*reversed(path.parents), path):
        if not parent.exists():
            parent.mkdir(exist_ok=True)
            made.append(parent)


def _unmake(made: list[Path]) -> None:
    """Remove folders that are still empty."""
    with suppress(OSError):
        for folder in reversed(made):
            folder.rmdir()


def _lock(folder: Path, given: str | Path, option: str) -> int:
    """The lock's descriptor. A lock file that was removed while this waited to open it locks nothing: once more."""
    while True:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(folder / LOCK)):
                    return lock
        except BlockingIOError:
            os.close(lock)
            raise InputError(option, str(given), "a folder that no other run is writing to") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _move_all(source: Path, target: Path) -> None:
    for name in sorted(os.listdir(source)):
        os.rename(source / name, target / name)
    source.rmdir()


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
