"""Processes of the stages, and how they end: all that were started, with whatever those started in turn."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

POLL = 0.1
"""Seconds between looks at what has ended, and at whether a signal has come."""

GRACE = 30.0
"""Seconds between asking stages to end and killing them: time to finish a step and to write a checkpoint."""


class Stopped(Exception):
    """Nothing is started any more."""


class Signals:
    """Signals that were received while `catching`.

    Attributes:
        numbers: Signal numbers in the order of their arrival.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Note SIGINT, SIGTERM and SIGHUP here instead of ending at once; what was ignored stays ignored.

        Elsewhere than in the main thread Python takes no handlers, and nothing is noted.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                before[number] = signal.getsignal(number)
                if before[number] != signal.SIG_IGN:
                    signal.signal(number, lambda number, frame: self.numbers.append(number))
                elif number == signal.SIGINT:
                    # Background jobs of a script ignore it, and processes inherit that. A handler that does nothing
                    # they do not: stages can still be asked to end.
                    signal.signal(number, lambda number, frame: None)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class Children:
    """Child processes, each in a group of its own, out of reach of a terminal's Ctrl-C."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen] = {}
        self._seen: set[psutil.Process] = set()
        self._changing = threading.Lock()
        self._ending = False

    @contextmanager
    def running(
        self, command: Sequence[str], place: Path, environment: Mapping[str, str]
    ) -> Iterator[subprocess.Popen]:
        """Start a process and know of it until the block ends, which has to wait for it.

        Args:
            command: Program and arguments.
            place: Working folder.
            environment: Variables.

        Yields:
            The process; its output and errors are one stream of text.

        Raises:
            Stopped: If processes have been asked to end.
        """
        with self._changing:
            if self._ending:
                raise Stopped
            process = subprocess.Popen(
                command,
                cwd=place,
                env=environment,
                stdin=subprocess.DEVNULL,  # a group in the background that reads from the terminal is stopped
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                process_group=0,
            )
            self._running[process.pid] = process
        yield process
        with self._changing:  # after an error it may still run
            del self._running[process.pid]

    def interrupt(self) -> None:
        """Ask all to end, as Ctrl-C does: DVC lets its stage end and releases its locks. None is started any more."""
        with self._changing:
            self._signal_all(signal.SIGINT)

    def _signal_all(self, number: int) -> None:
        self._ending = True
        self._look()
        for pid in self._running:
            _signal_group(pid, number)

    def kill(self) -> None:
        """Kill all, and whatever they started, wherever that is by now."""
        with self._changing:
            self._signal_all(signal.SIGKILL)
            for process in self._alive():
                with suppress(psutil.Error):
                    process.kill()  # psutil makes sure that the id still is that process

    def end(self, seconds: float = GRACE, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask all to end, wait, and kill what is left.

        Args:
            seconds: How long to wait.
            hurry: Says whether to wait no longer.
        """
        self.interrupt()
        deadline = time.monotonic() + seconds
        while self.alive() and not hurry() and time.monotonic() < deadline:
            time.sleep(POLL)
        self.kill()

    def alive(self) -> bool:
        """Whether one of those that were asked to end still runs, or something that it started."""
        with self._changing:
            return bool(self._alive())

    def _look(self) -> None:
        """Remember the whole tree: a notebook's kernel leaves the group, and loses its parent with the stage."""
        for pid in self._running:
            try:
                process = psutil.Process(pid)
                self._seen |= {process, *process.children(recursive=True)}
            except psutil.NoSuchProcess:
                continue

    def _alive(self) -> list[psutil.Process]:
        return [process for process in self._seen if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. One that has ended and that its parent never asked after does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(group, number)
