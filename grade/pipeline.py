"""Run the pipeline in one of its profiles: ``python -m grade.pipeline [cpu|smoke|full|h100] [stages] [--jobs N]``.

Profile ``cpu`` is ``dvc repro`` in place. Every other profile runs in a copy of the project, ``.workspaces/<profile>``,
whose ``dvc.yaml`` names that profile, so the project's own ``dvc.lock`` stays true for ``cpu`` and nobody edits a file
to switch. The copy is kept: a run that was interrupted goes on at the stage that it was in. It shares DVC's cache with
the project, and what ``full`` and ``h100`` find out comes back to ``outputs/<profile>``.

Stages that do not need each other run side by side, each in a ``dvc repro --single-item`` of its own: small matrices
gain nothing from a second thread, and two stages on one core each take half the time of one after the other on two.

Left out: everything that DVC does itself (what has changed, what is cached, locks). `dvc repro` gives the same results,
one stage at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from grade.config import read_yaml
from grade.errors import InputError

DEFAULT_PROFILE = "cpu"
VARS_FILE = "params/{}/suite.yaml"

_EVENTS = (
    (re.compile(r"Running stage '.+':$"), "runs"),
    (re.compile(r"Stage '.+' didn't change, skipping$"), "unchanged"),
    (re.compile(r"Stage '.+' is cached - skipping run, checking out outputs$"), "from the cache"),
)
_ADVICE = re.compile(
    r"Updating lock file|Use `dvc push`|To track the changes|\tgit add |To enable auto staging|\tdvc config "
)


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


def run(
    root: Path, profile: str = DEFAULT_PROFILE, dvc_arguments: Sequence[str] = (), jobs: int | None = None
) -> int:  # fmt: skip
    """Run the pipeline and say what it is doing.

    Args:
        root: The project's root: the folder with ``dvc.yaml``.
        profile: A folder under ``params/`` with a ``suite.yaml``.
        dvc_arguments: Names of stages, which run with all that they need (none: every stage), and options that are
            passed to each ``dvc repro --single-item``.
        jobs: Stages at once; default: what ``suite.yaml`` says, and at most one for each processor core.

    Returns:
        0 if every result is there and up to date, else the exit code of a ``dvc repro`` that failed.

    Raises:
        InputError: If ``root`` is no such folder, there is no such profile or stage, or ``jobs`` is not positive.
    """
    root = root.resolve()
    if not (root / "dvc.yaml").is_file():
        raise InputError("working folder", str(root), "the project's root, the folder with dvc.yaml")
    profiles = sorted(path.parent.name for path in root.glob(VARS_FILE.format("*")))
    if profile not in profiles:
        raise InputError("profile", profile, f"one of {', '.join(profiles)}")
    suite = read_yaml(root / VARS_FILE.format(profile))
    jobs = min(suite.get("jobs", 1), os.cpu_count() or 1) if jobs is None else jobs
    if jobs < 1:
        raise InputError("jobs", jobs, "at least 1")
    place = root if profile == DEFAULT_PROFILE else prepare_workspace(root, profile)
    started = time.monotonic()
    options = [word for word in dvc_arguments if word.startswith("-")]
    stages = _wanted(_stages(place), [word for word in dvc_arguments if not word.startswith("-")])
    code = _Schedule(place, stages, options, jobs).run()
    outputs = suite["outputs"]
    if code == 0 and place != root and profile != "smoke":
        copy_results(place, root, outputs)
    if code == 0:
        print(f"{profile}: done in {_duration(time.monotonic() - started)}; results in {outputs}", flush=True)
    else:
        print(f"{profile}: failed (dvc exit code {code}) after {_duration(time.monotonic() - started)}", flush=True)
    return code


def prepare_workspace(root: Path, profile: str) -> Path:
    """Make or refresh the copy of the project in which a profile runs.

    Args:
        root: The project's root, in a git checkout.
        profile: The profile that the copy's ``dvc.yaml`` shall name.

    Returns:
        The workspace, ``root/.workspaces/<profile>``. It has the project's files as they are now (tracked, or untracked
        and not ignored), without its results; what the workspace made itself stays.

    Raises:
        InputError: If ``root`` is not in a git checkout or ``dvc.yaml`` does not name the default profile exactly once.
    """
    workspace = root / ".workspaces" / profile
    workspace.mkdir(parents=True, exist_ok=True)
    files = _project_files(root)
    manifest = workspace / ".workspace-files"  # what was copied last time, so that what is gone can go here too
    if manifest.exists():
        for name in set(manifest.read_text(encoding="utf-8").splitlines()) - set(files):
            (workspace / name).unlink(missing_ok=True)
    for name in files:
        if name != "dvc.yaml":
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, workspace / name)  # with its time, by which DVC knows what not to hash again
    _write_if_changed(workspace / "dvc.yaml", _with_profile((root / "dvc.yaml").read_text(encoding="utf-8"), profile))
    # Inside the project's git checkout, but none of git's business: what is ignored there may be an output here.
    settings = f"[core]\n    no_scm = true\n[cache]\n    dir = {_cache_folder(root)}\n"
    _write_if_changed(workspace / ".dvc" / "config.local", settings)
    _write_if_changed(manifest, "".join(f"{name}\n" for name in files))
    return workspace


def copy_results(workspace: Path, root: Path, outputs: str) -> None:
    """Replace the project's ``outputs`` by the workspace's results: what is kept in git, and executed notebooks.

    Nothing happens while one of them is missing, because only a part of the pipeline has run.

    Args:
        workspace: A workspace in which the pipeline has run.
        root: The project's root.
        outputs: The profile's folder of results, relative to both.
    """
    from dvc.repo import Repo

    with Repo(str(workspace)) as repo:
        results = [Path(out.fs_path) for out in repo.index.outs if not out.use_cache or out.fs_path.endswith(".ipynb")]
    if not all(source.exists() for source in results):
        return
    target = root / outputs
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for source in results:
        copy = partial / source.relative_to(workspace / outputs)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of this module.

    Args:
        arguments: Without the program's name; default: of this process.

    Returns:
        The exit code: that of ``dvc repro``, or 2 for bad input.
    """
    parser = argparse.ArgumentParser(prog="python -m grade.pipeline", description="Run the pipeline in a profile.")
    parser.add_argument("profile", nargs="?", default=DEFAULT_PROFILE, help="folder under params/ (default: cpu)")
    parser.add_argument("stages", nargs="*", help="stages to bring up to date, with all that they need (default: all)")
    parser.add_argument("--jobs", type=int, help="stages at once (default: as in the profile's suite.yaml)")
    parser.epilog = "Other options are passed to `dvc repro`: --force, --dry."
    known, options = parser.parse_known_args(arguments)
    try:
        return run(Path.cwd(), known.profile, [*known.stages, *options], known.jobs)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


@dataclass
class _Schedule:
    """Runs stages as soon as those that they need are up to date, `jobs` at once, and says so line by line."""

    place: Path
    stages: Mapping[str, Stage]
    options: Sequence[str]
    jobs: int
    seen: int = 0
    code: int = 0
    printing: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        """Run all that is not up to date.

        Returns:
            0, or the first exit code that is not; then what was running has ended, and nothing new was started.
        """
        todo = self._outdated()
        for name in self.stages:
            if name not in todo:
                self._announce(name, "unchanged")
        running: dict[Future, str] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                while running or (todo and not self.code):
                    busy = todo | set(running.values())
                    ready = [n for n in self._urgent_first(todo) if not self.stages[n].needs & busy]
                    for name in ready[: 0 if self.code else self.jobs - len(running)]:
                        running[pool.submit(self._repro, name)] = name
                        todo.remove(name)
                    for ended in wait(running, return_when=FIRST_COMPLETED).done:
                        del running[ended]
                        self.code = self.code or ended.result()
            except KeyboardInterrupt:  # DVC got it too: it releases its locks, and the pool waits for that
                self.code = 130
        return self.code

    def _outdated(self) -> set[str]:
        """Stages that have changed, and all that need them."""
        from dvc.repo import Repo

        if {"--force", "-f"} & set(self.options):
            return set(self.stages)
        with Repo(str(self.place)) as repo:
            found = {key.rpartition(":")[2] for key in repo.status()} & set(self.stages)
        for name, stage in self.stages.items():  # those that are needed come first
            if stage.needs & found:
                found.add(name)
        return found

    def _urgent_first(self, todo: set[str]) -> list[str]:
        """The longest chain of stages that wait for it decides; else the order of ``dvc.yaml``."""
        depth: dict[str, int] = {}
        for name, stage in reversed(self.stages.items()):
            depth.setdefault(name, 0)
            for needed in stage.needs:
                depth[needed] = max(depth.get(needed, 0), depth[name] + 1)
        return sorted((name for name in self.stages if name in todo), key=lambda name: -depth[name])

    def _repro(self, name: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-m", "dvc", "--wait-for-lock", "repro", "--single-item", *self.options, name],
            cwd=self.place,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        started, number = time.monotonic(), 0
        for line in process.stdout:
            event = next((event for pattern, event in _EVENTS if pattern.match(line)), None)
            if event == "runs":
                started, number = time.monotonic(), self._announce(name, self.stages[name].description)
            elif event:
                self._announce(name, event)
            elif line.strip() and not _ADVICE.match(line):
                self._print(f"{name} | {line.rstrip()}" if self.jobs > 1 else line.rstrip())
        code = process.wait()
        if number:
            word = "took" if code == 0 else "stopped after"
            self._print(f"[{number}/{len(self.stages)}] {name} {word} {_duration(time.monotonic() - started)}")
        return code

    def _announce(self, name: str, what: str) -> int:
        with self.printing:
            self.seen += 1
            total = len(self.stages)
            print(f"[{self.seen}/{total}] {name}: {what}; {total - self.seen} left", flush=True)
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
        )
        if self.jobs > 1:  # each has its share of the cores
            environment.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // self.jobs, 1)))
        return environment


def _stages(place: Path) -> dict[str, Stage]:
    """Every stage after those that it needs, else in the order of ``dvc.yaml``."""
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(place)) as repo:
            graph = repo.index.graph  # from a stage to what it needs
            needs = {stage.name: frozenset(n.name for n in graph.successors(stage)) for stage in graph}
            found = {s.name: Stage(s.name, s.desc or "", needs[s.name]) for s in repo.index.stages}
    except DvcException as error:
        raise InputError("dvc.yaml", str(place / "dvc.yaml"), f"a pipeline that DVC reads ({error})") from None
    ordered: dict[str, Stage] = {}
    while len(ordered) < len(found):
        name = next(n for n, stage in found.items() if n not in ordered and stage.needs <= set(ordered))
        ordered[name] = found[name]
    return ordered


def _wanted(stages: Mapping[str, Stage], names: Sequence[str]) -> dict[str, Stage]:
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


def _cache_folder(root: Path) -> str:
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return repo.cache.local.path


def _project_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise InputError("project folder", str(root), "a git checkout (git lists the project's files)") from None
    # Results and their lock belong to the default profile. A tracked file may have been deleted since.
    names = sorted({name for name in listing.split("\0") if name and name.split("/")[0] not in ("outputs", "dvc.lock")})
    return [name for name in names if (root / name).is_file()]


def _with_profile(dvc_yaml: str, profile: str) -> str:
    default = VARS_FILE.format(DEFAULT_PROFILE)
    if dvc_yaml.count(default) != 1:
        raise InputError("dvc.yaml", f"{dvc_yaml.count(default)} times {default}", "exactly one mention, under vars")
    return dvc_yaml.replace(default, VARS_FILE.format(profile))


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


if __name__ == "__main__":
    sys.exit(main())
