"""Run the pipeline in one of its profiles: ``python -m grade.pipeline [cpu|smoke|full|h100] [options of dvc repro]``.

Profile ``cpu`` is ``dvc repro`` in place. Every other profile runs in a copy of the project, ``.workspaces/<profile>``,
whose ``dvc.yaml`` names that profile, so the project's own ``dvc.lock`` stays true for ``cpu`` and nobody edits a file
to switch. The copy is kept: a run that was interrupted goes on at the stage that it was in. It shares DVC's cache with
the project, and what ``full`` and ``h100`` find out comes back to ``outputs/<profile>``.

Left out: everything that DVC does itself (what to run, when to skip, locks). This only adds a line per stage.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grade.config import read_yaml
from grade.errors import InputError

DEFAULT_PROFILE = "cpu"
VARS_FILE = "params/{}/suite.yaml"

_EVENTS = (
    (re.compile(r"Running stage '(.+)':$"), "runs"),
    (re.compile(r"Stage '(.+)' didn't change, skipping$"), "unchanged"),
    (re.compile(r"Stage '(.+)' is cached - skipping run, checking out outputs$"), "from the cache"),
)


def run(root: Path, profile: str = DEFAULT_PROFILE, dvc_arguments: Sequence[str] = ()) -> int:
    """Run the pipeline and say what it is doing.

    Args:
        root: The project's root: the folder with ``dvc.yaml``.
        profile: A folder under ``params/`` with a ``suite.yaml``.
        dvc_arguments: Passed to ``dvc repro``: options and stage names.

    Returns:
        The exit code of ``dvc repro``; 0 means that every result is there and is up to date.

    Raises:
        InputError: If ``root`` is no such folder or there is no such profile.
    """
    root = root.resolve()
    if not (root / "dvc.yaml").is_file():
        raise InputError("working folder", str(root), "the project's root, the folder with dvc.yaml")
    profiles = sorted(path.parent.name for path in root.glob(VARS_FILE.format("*")))
    if profile not in profiles:
        raise InputError("profile", profile, f"one of {', '.join(profiles)}")
    place = root if profile == DEFAULT_PROFILE else prepare_workspace(root, profile)
    started = time.monotonic()
    code = _repro(place, dvc_arguments)
    outputs = read_yaml(root / VARS_FILE.format(profile))["outputs"]
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
    parser.epilog = "Everything else is passed to `dvc repro`: --force, --dry, names of stages."
    known, dvc_arguments = parser.parse_known_args(arguments)
    try:
        return run(Path.cwd(), known.profile, dvc_arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _repro(place: Path, dvc_arguments: Sequence[str]) -> int:
    descriptions = _stages(place)
    environment = dict(
        os.environ,
        # Stages call `python`; it has to be this one, with or without an activated environment.
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        # The workspace's own copy of the package, not an installed one.
        PYTHONPATH=os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")])),
        PYTHONUNBUFFERED="1",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", *dvc_arguments],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    progress = _Progress(descriptions)
    try:
        for line in process.stdout:
            print(progress.translate(line.rstrip("\n")), flush=True)
        code = process.wait()
    except KeyboardInterrupt:  # DVC got it too: let it release its locks
        process.wait()
        code = 130
    progress.finish(code)
    return code


class _Progress:
    """Turns DVC's line for each stage into one with its number, what it does and what is left."""

    def __init__(self, descriptions: Mapping[str, str]) -> None:
        self.descriptions = descriptions
        self.seen = 0
        self.running: tuple[str, float] | None = None

    def translate(self, line: str) -> str:
        for pattern, event in _EVENTS:
            match = pattern.match(line)
            if match:
                return self._stage(match[1], event)
        return line

    def _stage(self, name: str, event: str) -> str:
        self.finish(0)
        self.seen += 1
        total = max(len(self.descriptions), self.seen)
        what = self.descriptions.get(name, "") if event == "runs" else event
        if event == "runs":
            self.running = name, time.monotonic()
        return f"[{self.seen}/{total}] {name}: {what}; {total - self.seen} left"

    def finish(self, code: int) -> None:
        if self.running:
            name, started = self.running
            word = "took" if code == 0 else "stopped after"
            print(f"[{self.seen}/{len(self.descriptions)}] {name} {word} {_duration(time.monotonic() - started)}")
            self.running = None


def _stages(place: Path) -> dict[str, str]:
    from dvc.exceptions import DvcException
    from dvc.repo import Repo

    try:
        with Repo(str(place)) as repo:
            return {stage.name: stage.desc or "" for stage in repo.index.stages}
    except DvcException as error:
        raise InputError("dvc.yaml", str(place / "dvc.yaml"), f"a pipeline that DVC reads ({error})") from None


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
