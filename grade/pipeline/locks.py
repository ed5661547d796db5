"""One pipeline of a profile at a time, and DVC's locks of processes that are dead."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from grade.errors import InputError
from grade.pipeline.processes import is_alive
from grade.results import replacing

TMP = ".dvc/tmp"

CLOCK = 1.0
"""Seconds by which the start of a process, counted in ticks since boot, may be off."""


@contextmanager
def only_pipeline(root: Path, profile: str) -> Iterator[None]:
    """Hold a profile's pipeline; the lock goes with the process, however it ends.

    Args:
        root: The project's root.
        profile: The profile. Two profiles can run at once: each has its own folder.

    Raises:
        InputError: If another process holds it, or the lock cannot be written.
    """
    path = root / TMP / f"repro-{profile}.lock"
    holder = path.with_suffix(".pid")  # beside the lock, which some systems let nobody else read
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        holder.write_text(str(os.getpid()), encoding="utf-8")
    except Timeout:
        pid = _text(holder) or "unknown"
        allowed = f"one pipeline of a profile in a folder: wait for process {pid}, or end it with `kill {pid}`"
        raise InputError("profile", profile, allowed) from None
    except OSError as error:
        raise InputError(TMP, str(path.parent), f"a folder that can be written ({error.strerror})") from None
    try:
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def free_dvc_locks(place: Path) -> list[str]:
    """Remove DVC's locks of dead processes, and refuse to start beside a live one.

    DVC writes who uses a path, with the process's id, to ``.dvc/tmp/rwlock``. A process that is killed leaves its
    lines behind. They are dead if there is no such process, if it only waits to be collected, or if it started after
    the file was last written and so cannot have written them, as after a reboot.

    Args:
        place: A folder with ``.dvc``.

    Returns:
        A line for each dead process whose locks were removed.

    Raises:
        InputError: If another DVC command is at work in the folder, or its file of locks is damaged.
    """
    from dvc.lock import LockError, make_lock
    from dvc.repo import Repo

    with Repo(str(place)) as repo:
        hardlink = repo.config["core"].get("hardlink_lock", False)
    tmp = place / TMP
    try:
        for name in ("lock", "rwlock.lock"):  # as DVC does: nobody edits the file while these are held
            with make_lock(str(tmp / name), tmp_dir=str(tmp), hardlink_lock=hardlink):
                lines = _free(tmp / "rwlock") if name == "rwlock.lock" else []
    except LockError:
        pid = _text(tmp / name) or "unknown"
        allowed = f"no other DVC command in the folder: wait for process {pid}; if there is none, remove the file"
        raise InputError("DVC's lock", str(tmp / name), allowed) from None
    return lines


def _free(path: Path) -> list[str]:
    if not path.is_file():
        return []
    try:
        content, written = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
        holders = {info["pid"]: info["cmd"] for infos in _groups(content) for info in infos}
    except (ValueError, TypeError, KeyError, AttributeError):
        allowed = "DVC's list of locks; it is damaged: remove the file if no DVC command runs in the folder"
        raise InputError("DVC's locks", str(path), allowed) from None
    dead = {pid for pid in holders if not _wrote(pid, written)}
    for pid in sorted(set(holders) - dead):
        # A stage's DVC leads a group, which holds what it started.
        target = f"-INT -- -{pid}" if _leads_a_group(pid) else f"-INT {pid}"
        allowed = f"no other DVC command in the folder: wait for process {pid}, or end it with `kill {target}`"
        raise InputError("DVC's locks", f"{path.name} of {holders[pid]}", allowed)
    if dead:
        with replacing(path) as file:  # all who are named are dead
            json.dump({}, file)
    return [f"removed DVC's locks of process {pid}, which is dead ({holders[pid]})" for pid in sorted(dead)]


def _groups(content: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [[info] for info in content.get("write", {}).values()] + list(content.get("read", {}).values())


def _wrote(pid: int, written: float) -> bool:
    """Whether a process lives that can have written a file at a time."""
    try:
        process = psutil.Process(pid)
        return is_alive(process) and process.create_time() <= written + CLOCK
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # of somebody else: not provably dead
        return True


def _leads_a_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except OSError:
        return False


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
