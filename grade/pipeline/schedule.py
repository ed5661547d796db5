"""Stages of the pipeline side by side, each in a ``dvc repro --single-item`` of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from grade.errors import InputError
from grade.pipeline.processes import GRACE, POLL, Children, Signals, Stopped
from grade.results import replacing

MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""Unit of the system's peak resident memory: bytes on macOS, KiB on Linux."""

KNOWN_WARNINGS = (
    "ignore::FutureWarning:transformers.modeling_utils",  # of its own attribute, which peft reads
    "ignore::UserWarning:peft.tuners.lora.layer",  # GPT-2's transposed weights, which it then handles
)
"""What pinned packages say in every process and no reader can change."""

DVC = """\
import logging, sys
from dvc.cli import main
from dvc.logger import set_loggers_level
from dvc.ui import ui
ui.enable = lambda: None
sys.argv[0] = "dvc"
with set_loggers_level(logging.ERROR):
    sys.exit(main(sys.argv[1:]))
"""
"""DVC that says nothing but why it failed: with --quiet it does not say that either."""

LOGS = ".dvc/tmp/logs"
"""What each stage printed the last time it ran, one file a stage."""

RAN_HERE = ".dvc/tmp/ran_here"
"""Names of the stages that have run in this clone, below a folder that git ignores."""

TIMINGS = "timings.json"
"""Seconds and peak memory of every stage the last time it ran, in the profile's folder of results."""


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
        name: As in ``dvc.yaml``, with its matrix's values.
        description: What it does.
        needs: Names of the stages whose outputs it reads.
    """

    name: str
    description: str
    needs: frozenset[str]


@dataclass
class Schedule:
    """Runs stages as soon as those that they need are up to date, `jobs` at once, and says so line by line.

    SIGINT, SIGTERM and SIGHUP end the running stages: they are asked to, and killed after `grace` seconds or at a
    second signal. Nothing that a stage started outlives the pipeline.

    Attributes:
        failed: Names of the stages that failed.
        stopped_by: Name of the signal that ended the run, or None.
    """

    place: Path
    stages: Mapping[str, Stage]
    options: Sequence[str]
    jobs: int
    outputs: str = "outputs"
    seen: int = 0
    code: int = 0
    grace: float = GRACE
    failed: list[str] = field(default_factory=list)
    stopped_by: str | None = None
    printing: threading.Lock = field(default_factory=threading.Lock)
    children: Children = field(default_factory=Children)

    def run(self) -> int:
        """Run all that is not up to date.

        Returns:
            0, or the first exit code that is not; then what was running has ended, and nothing new was started. For a
            signal, 128 and its number.
        """
        todo, timings = self._outdated(), Timings(self.place / self.outputs / TIMINGS)
        self.seen = len(self.stages) - len(todo)
        self._print(f"{len(todo)} of {len(self.stages)} stages to run{timings.expected(todo, self.jobs)}")
        running: dict[Future, str] = {}
        signals = Signals()
        with signals.catching(), ThreadPoolExecutor(self.jobs) as pool:
            try:
                while running or (todo and not self.code and not signals.numbers):
                    busy = todo | set(running.values())
                    ready = [n for n in self._urgent_first(todo, timings) if not self.stages[n].needs & busy]
                    for name in ready[: 0 if self.code or signals.numbers else self.jobs - len(running)]:
                        running[pool.submit(self._repro, name, timings)] = name
                        todo.remove(name)
                    for ended in wait(running, timeout=POLL, return_when=FIRST_COMPLETED).done:
                        del running[ended]
                        self.code = self.code or ended.result()
                    if signals.numbers and not self.stopped_by:
                        self._end(signals)
            except BaseException:  # the reader of the output has gone, the disk is full: no stage is left alone
                self.children.end(self.grace)
                raise
        if signals.numbers and not self.stopped_by:  # between two stages
            self._end(signals)
        return self.code

    def _end(self, signals: Signals) -> None:
        """End the running stages; with them, what they started."""
        number = signals.numbers[0]
        self.code, self.stopped_by = 128 + number, signal.Signals(number).name
        self._print(f"{self.stopped_by}: ending the running stages; a second signal, or {self.grace:.0f} s, kills them")
        self.children.end(self.grace, hurry=lambda: len(signals.numbers) > 1)

    def _outdated(self) -> set[str]:
        """Stages that have changed or have never run in this clone, and all that need them.

        A clone comes with the published results. To DVC they are up to date; whoever reproduces them wants them made.
        """
        from dvc.exceptions import DvcException
        from dvc.repo import Repo

        if {"--force", "-f"} & set(self.options):
            return set(self.stages)
        try:
            with Repo(str(self.place)) as repo:
                found = {key.rpartition(":")[2] for key in repo.status()} & set(self.stages)
        except DvcException as error:
            raise InputError("working folder", str(self.place), f"a folder that DVC can read ({error})") from None
        found |= set(self.stages) - self._ran_here()
        for name, stage in self.stages.items():  # those that are needed come first
            if stage.needs & found:
                found.add(name)
        return found

    def _ran_here(self) -> set[str]:
        path = self.place / RAN_HERE
        return set(path.read_text(encoding="utf-8").split()) if path.is_file() else set()

    def _note_that_it_ran(self, name: str) -> None:
        with replacing(self.place / RAN_HERE) as file:
            file.write("\n".join(sorted(self._ran_here() | {name})) + "\n")

    def _urgent_first(self, todo: set[str], timings: Timings) -> list[str]:
        """The longest chain of stages that starts here decides, in seconds of the last time they ran."""
        chain: dict[str, float] = {}
        for name, stage in reversed(self.stages.items()):
            chain[name] = chain.get(name, 0.0) + timings.seconds(name)
            for needed in stage.needs:
                chain[needed] = max(chain.get(needed, 0.0), chain[name])
        return sorted((name for name in self.stages if name in todo), key=lambda name: -chain[name])

    def _repro(self, name: str, timings: Timings) -> int:
        started, number = time.monotonic(), self._announce(name)
        options = [*self.options, *([] if name in self._ran_here() else ["--force"])]
        command = [sys.executable, "-c", DVC, "--wait-for-lock", "repro", "--single-item", *options, name]
        log = self.log_of(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (
                open(log, "w", encoding="utf-8") as file,
                self.children.running(command, self.place, self._environment()) as process,
            ):
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    if line.strip():
                        self._print(f"{name} | {line.rstrip()}" if self.jobs > 1 else line.rstrip())
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
        except Stopped:
            return 0  # it was about to start when a signal came
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        seconds = time.monotonic() - started
        if code == 0 and not {"--dry"} & set(self.options):
            with self.printing:
                self._note_that_it_ran(name)
                timings.record(name, seconds, usage.ru_maxrss * MAXRSS_BYTES)
        if code:
            self.failed.append(name)
        word = "took" if code == 0 else "stopped after"
        self._print(f"[{number}/{len(self.stages)}] {name} {word} {duration(seconds)}")
        return code

    def log_of(self, name: str) -> Path:
        """The file with what a stage printed the last time it ran."""
        return self.place / LOGS / f"{name.replace('/', '-')}.log"

    def _announce(self, name: str) -> int:
        with self.printing:
            self.seen += 1
            total = len(self.stages)
            print(f"[{self.seen}/{total}] {name}: {self.stages[name].description}", flush=True)
            return self.seen

    def _print(self, line: str) -> None:
        with self.printing:
            print(line, flush=True)

    def _environment(self) -> dict[str, str]:
        environment = dict(
            os.environ,
            # Stages call `python`; it has to be this one, with or without an activated environment.
            PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            # The workspace's own copy of the package, not an installed one.
            PYTHONPATH=os.pathsep.join(filter(None, [str(self.place), os.environ.get("PYTHONPATH")])),
            PYTHONUNBUFFERED="1",
            PYTHONWARNINGS=",".join([os.environ.get("PYTHONWARNINGS", ""), *KNOWN_WARNINGS]).strip(","),
        )
        if self.jobs > 1:  # each has its share of the cores
            environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // self.jobs, 1)))
        return environment


def read_stages(place: Path) -> dict[str, Stage]:
    """Every stage after those that it needs, else in the order of ``dvc.yaml``."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(place)) as repo:
            graph = repo.index.graph  # from a stage to what it needs
            needs = {stage.name: frozenset(n.name for n in graph.successors(stage)) for stage in graph}
            found = {s.name: Stage(s.name, s.desc or "", needs[s.name]) for s in repo.index.stages}
    except (DvcException, RecursionError) as error:  # lists in lists in lists
        raise InputError("dvc.yaml", str(place / "dvc.yaml"), f"a pipeline that DVC reads ({error})") from None
    ordered: dict[str, Stage] = {}
    while len(ordered) < len(found):
        name = next(n for n, stage in found.items() if n not in ordered and stage.needs <= set(ordered))
        ordered[name] = found[name]
    return ordered


def wanted_stages(stages: Mapping[str, Stage], names: Sequence[str]) -> dict[str, Stage]:
    """The named stages (a matrix's name stands for all of its stages) and what they need; all if none is named."""
    wanted: set[str] = set()
    for name in names:
        matching = {stage for stage in stages if name in (stage, stage.partition("@")[0])}
        if not matching:
            raise InputError("stage", name, f"one of {', '.join(stages)}")
        wanted |= matching
    for name in reversed(stages):
        if name in wanted:
            wanted |= stages[name].needs
    return {name: stage for name, stage in stages.items() if name in wanted or not names}


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


class Timings:
    """How long each stage took and what memory it needed when it last ran: read, expected, recorded.

    A stage that DVC found up to date, or in its cache, after all is not recorded: it took a moment and says nothing.
    """

    SHORTEST = 3.0
    """Seconds. DVC itself takes about one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.known = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.known = {}

    def expected(self, names: Collection[str], jobs: int) -> str:
        """Minutes and memory for some stages, as far as they are known.

        Args:
            names: The stages.
            jobs: Stages at once.

        Returns:
            Text that continues a sentence; empty where nothing is known.
        """
        known = [self.known[name] for name in names if name in self.known]
        if not known:
            return ""
        seconds = max(sum(row["seconds"] for row in known) / jobs, max(row["seconds"] for row in known))
        memory = sum(sorted(row["peak_memory_bytes"] for row in known)[-jobs:]) / 2**30
        return f": about {duration(seconds)} with {jobs} at once, at most {memory:.1f} GiB of memory"

    def seconds(self, name: str) -> float:
        """What a stage took when it last ran; a second where that is not known."""
        return self.known.get(name, {}).get("seconds", 1.0)

    def record(self, name: str, seconds: float, peak_memory_bytes: int) -> None:
        """Keep what a stage took, if it ran at all.

        Args:
            name: The stage.
            seconds: Wall time.
            peak_memory_bytes: Largest resident memory of one of its processes.
        """
        if seconds < self.SHORTEST:
            return
        self.known[name] = {"seconds": round(seconds, 1), "peak_memory_bytes": peak_memory_bytes}
        with replacing(self.path) as file:
            file.write(json.dumps(self.known, indent=1, sort_keys=True) + "\n")
