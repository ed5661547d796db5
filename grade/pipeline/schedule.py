"""``grade repro``: the stages of a profile side by side, each in a ``dvc repro --single-item`` of its own.

Small matrices gain nothing from a second thread, and two stages on one core each take half the time of one after the
other on two. ``make -j`` does not fit: it knows neither DVC's graph nor which chain of stages is the longest. What has
changed, what is cached and what a kill leaves behind is DVC's business.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import networkx as nx
from filelock import FileLock, Timeout

from grade.config import allowed_names
from grade.errors import InputError
from grade.files import read_json, write_json
from grade.pipeline.profiles import prepare_workspace, suite_values
from grade.results import RSS_UNIT

GRACE = 30.0
"""Seconds between asking stages to end and killing them: time to finish a step and to write a checkpoint."""

SHORTEST = 3.0
"""Seconds: what took less was up to date or in DVC's cache after all, and its time says nothing."""

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


def run(
    root: Path, profile: str, names: Sequence[str] = (), jobs: int | None = None, force: bool = False, dry: bool = False
) -> int:  # fmt: skip
    """Bring a profile's stages up to date in its workspace: all, or the named ones with what they need.

    Returns 0, or the exit code of a stage that failed: then those beside it end first, and no other begins. ``jobs``
    are stages at once (default: what ``suite.yaml`` says, at most the processor's cores); ``dry`` only lists stages.
    """
    suite, started = suite_values(root, profile), time.monotonic()
    jobs = min(suite["jobs"], os.cpu_count() or 1) if jobs is None else jobs
    if jobs < 1:
        raise InputError("jobs", jobs, "at least 1")
    place = prepare_workspace(root, profile)
    lock = FileLock(place / ".dvc" / "tmp" / "repro.lock")
    Path(lock.lock_file).parent.mkdir(exist_ok=True)
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        raise InputError("profile", profile, "one whose pipeline is not running") from None
    with held:
        stages = _outdated(place, names, force)
        if dry:
            print(*nx.topological_sort(stages), sep="\n")
            return 0
        schedule = _Schedule(place, place / suite["outputs"] / "timings.json", jobs, force)
        code = schedule.run(stages)
    logs = [f"{name} (log: {os.path.relpath(schedule.log_of(name), root)})" for name in schedule.failed]
    what = f"failed: {', '.join(logs)}" if code else f"done: {os.path.relpath(place / suite['outputs'], root)}"
    print(f"{profile}: {what} ({time.monotonic() - started:.0f} s)")
    return code


def _outdated(place: Path, names: Sequence[str], force: bool) -> nx.DiGraph:
    """Stages that have changed, or need one that has; an edge leads from a stage to one that needs it.

    Of the named stages (a matrix's name stands for all of its stages) and what they need; of all if none is named.
    """
    from dvc.repo import Repo

    with Repo(str(place)) as repo:
        graph = nx.DiGraph()
        graph.add_nodes_from((stage.name, {"description": stage.desc or ""}) for stage in repo.index.stages)
        graph.add_edges_from((needed.name, stage.name) for stage, needed in repo.index.graph.edges)
        changed = set(graph) if force else {key.rpartition(":")[2] for key in repo.status()} & set(graph)
    wanted = set() if names else set(graph)
    for name in names:
        matching = {stage for stage in graph if name in (stage, stage.partition("@")[0])}
        if not matching:
            raise InputError("stage", name, allowed_names(name, graph))
        wanted |= matching.union(*(nx.ancestors(graph, stage) for stage in matching))
    return graph.subgraph(changed.union(*(nx.descendants(graph, stage) for stage in changed)) & wanted).copy()


class _Schedule:
    """Runs stages as soon as those that they need are up to date, and says so line by line."""

    def __init__(self, place: Path, timings_file: Path, jobs: int, force: bool) -> None:
        self.place, self.timings_file, self.jobs, self.force = place, timings_file, jobs, force
        self.timings = read_json(timings_file) if timings_file.is_file() else {}
        self.failed: list[str] = []
        self.running: dict[str, subprocess.Popen] = {}
        self.lock, self.ending = threading.Lock(), False

    def run(self, stages: nx.DiGraph) -> int:
        """Run the stages. A signal ends those that run, with what they started, and raises `KeyboardInterrupt`."""
        todo, number, futures, code = self._longest_chain_first(stages), len(stages), {}, 0
        self._print(f"stages to run: {number}")
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGINT too: a script's background jobs ignore it
        before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while futures or (todo and not code):
                    ready = [name for name in todo if not stages.pred[name]]
                    for name in ready[: 0 if code else self.jobs - len(futures)]:
                        todo.remove(name)
                        description = stages.nodes[name]["description"]
                        self._print(f"[{number - len(todo)}/{number}] {name}: {description}")
                        future: Future[int] = pool.submit(self._repro, name)
                        futures[future] = name
                    for ended in wait(futures, return_when=FIRST_COMPLETED).done:
                        stages.remove_node(futures.pop(ended))
                        code = code or ended.result()
            except BaseException:
                self._end()
                raise
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        return code

    def _longest_chain_first(self, stages: nx.DiGraph) -> list[str]:
        """By the seconds of the last run; one, where a stage has none."""
        chain: dict[str, float] = {}
        for name in reversed(list(nx.topological_sort(stages))):
            after = max((chain[later] for later in stages.successors(name)), default=0.0)
            chain[name] = after + self.timings.get(name, {}).get("seconds", 1.0)
        return sorted(stages, key=lambda name: -chain[name])

    def _repro(self, name: str) -> int:
        """Run one stage: its output goes to the terminal and to its log."""
        started, log = time.monotonic(), self.log_of(name)
        options = ["--single-item", *(["--force"] if self.force else [])]
        log.parent.mkdir(parents=True, exist_ok=True)
        with self.lock:
            if self.ending:
                return 1
            # A group of its own, out of reach of a terminal's Ctrl-C; in the background it must not read from there.
            process = self.running[name] = subprocess.Popen(
                [sys.executable, "-c", DVC, "--wait-for-lock", "repro", *options, name],
                cwd=self.place, env=self._environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace", process_group=0,
            )  # fmt: skip
        with open(log, "w", encoding="utf-8") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                if line.strip():
                    self._print(f"{name} | {line.rstrip()}")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode, seconds = os.waitstatus_to_exitcode(status), time.monotonic() - started
        with self.lock:
            del self.running[name]
            if process.returncode:
                self.failed.append(name)
            elif seconds >= SHORTEST:
                peak = usage.ru_maxrss * RSS_UNIT
                self.timings[name] = {"seconds": round(seconds, 1), "peak_memory_bytes": peak}
                write_json(self.timings_file, self.timings, sort_keys=True)
        self._print(f"{name} {'stopped after' if process.returncode else 'took'} {seconds:.1f} s")
        return abs(process.returncode)

    def _end(self) -> None:
        """Ask the running stages to end, as Ctrl-C does; after `GRACE` seconds or a second signal, kill them."""
        with self.lock:
            self.ending = True
        self._signal(signal.SIGINT)
        deadline = time.monotonic() + GRACE
        try:
            while self.running and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for process in list(self.running.values()):
            with suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
                os.killpg(process.pid, number)

    def log_of(self, name: str) -> Path:
        """The file with what a stage printed the last time it ran."""
        return self.place / ".dvc" / "tmp" / "logs" / f"{name.replace('/', '-')}.log"

    def _print(self, line: str) -> None:
        with self.lock:
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
