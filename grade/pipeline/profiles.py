"""Run the pipeline in one of its profiles: ``grade repro [cpu|smoke|full|h100] [stages] [--jobs N]``.

Profile ``cpu`` is ``dvc repro`` in place. Every other profile runs in a copy of the project, ``.workspaces/<profile>``,
whose ``dvc.yaml`` names that profile, so the project's own ``dvc.lock`` stays true for ``cpu`` and nobody edits a file
to switch. The copy is kept: a run that was interrupted goes on at the stage that it was in. It shares DVC's cache with
the project, and what ``full`` and ``h100`` find out comes back to ``outputs/<profile>``.

Stages that do not need each other run side by side, each in a ``dvc repro --single-item`` of its own: small matrices
gain nothing from a second thread, and two stages on one core each take half the time of one after the other on two.

A profile's pipeline runs once at a time in a folder. A signal ends it with all its stages; `grade.pipeline.processes`
says how.

Left out: everything that DVC does itself (what has changed, what is cached, locks). `dvc repro` gives the same results,
one stage at a time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from grade.errors import InputError
from grade.files import claimed
from grade.pipeline.locks import free_dvc_locks, only_pipeline
from grade.pipeline.params import DEFAULT_PROFILE, resolved_files, suite_values
from grade.pipeline.schedule import Schedule, duration, read_stages, wanted_stages

VARS_FILE = "params/{}/suite.yaml"

EVERYTHING = ("*", "*/")
"""Names in a profile's folder of results: the profile, and nobody else, writes there."""


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
        0 if every result is there and up to date, the exit code of a ``dvc repro`` that failed, or 128 and the number
        of a signal that ended the run.

    Raises:
        InputError: If ``root`` is no such folder or its path is one that DVC or Python cannot use, there is no such
            profile or stage, ``jobs`` is not positive, the profile's results would replace others, or another pipeline
            or DVC command is at work in the folder.
    """
    root = root.resolve()
    _check_path(root)
    suite = suite_values(root, profile)
    jobs = min(suite["jobs"], os.cpu_count() or 1) if jobs is None else jobs
    if jobs < 1:
        raise InputError("jobs", jobs, "at least 1")
    with only_pipeline(root, profile):
        started = time.monotonic()
        place = root if profile == DEFAULT_PROFILE else prepare_workspace(root, profile)
        options = [word for word in dvc_arguments if word.startswith("-")]
        stages = wanted_stages(read_stages(place), [word for word in dvc_arguments if not word.startswith("-")])
        if place != root:
            _check_results(root, suite["outputs"])
        for line in free_dvc_locks(place):
            print(line, flush=True)
        schedule = Schedule(place, stages, options, jobs, suite["outputs"])
        code = schedule.run()
        if code == 0 and place != root and profile != "smoke":
            copy_results(place, root, suite["outputs"])
        print(f"{profile}: {_summary(schedule, root, time.monotonic() - started)}", flush=True)
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
    files = _project_files(root)
    (root / ".workspaces" / profile).mkdir(parents=True, exist_ok=True)
    workspace = (root / ".workspaces" / profile).resolve()  # it may be on another disk
    manifest = workspace / ".workspace-files"  # what was copied last time, so that what is gone can go here too
    if manifest.exists():
        for name in set(os.fsdecode(manifest.read_bytes()).split("\0")) - {*files, ""}:
            (workspace / name).unlink(missing_ok=True)
    own = f"params/{profile}/"
    for name in files:
        if name != "dvc.yaml" and not name.startswith(own):
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, workspace / name)  # with its time, by which DVC knows what not to hash again
    for name, text in resolved_files(root, profile).items():
        _write_if_changed(workspace / own / name, text)
    _write_if_changed(workspace / "dvc.yaml", _with_profile(root / "dvc.yaml", profile))
    # Inside the project's git checkout, but none of git's business: what is ignored there may be an output here.
    settings = f"[core]\n    no_scm = true\n[cache]\n    dir = {_cache_folder(root, workspace / '.dvc')}\n"
    _write_if_changed(workspace / ".dvc" / "config.local", settings)
    manifest.write_bytes(b"".join(os.fsencode(f"{name}\0") for name in files))
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
    if not results or not all(source.exists() for source in results):
        return
    results += sorted(path for path in (workspace / outputs).glob("*.*") if path.is_file())  # the page of results
    results += sorted((workspace / outputs).glob("*/**/timings*"))  # in git as well, but nothing that DVC compares
    with claimed(root / outputs, EVERYTHING, option="outputs") as folder, folder.replacement() as new:
        for source in results:
            copy = new / source.relative_to(workspace / outputs)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)


def _check_path(root: Path) -> None:
    if not (root / "dvc.yaml").is_file():
        raise InputError("working folder", str(root), "the project's root, the folder with dvc.yaml")
    try:
        str(root).encode("utf-8")
    except UnicodeEncodeError:
        raise InputError("working folder", str(root), "a path in UTF-8: DVC stores paths as text") from None
    # PYTHONPATH cannot quote its separator: a notebook would import an installed copy of the package. DVC's progress
    # bars fill braces in, and a line break would end this program's messages.
    wrong = [character for character in (os.pathsep, "{", "}", "\n") if character in str(root)]
    if wrong:
        raise InputError("working folder", str(root), f"a path without {wrong[0]!r}")


def _check_results(root: Path, outputs: str) -> None:
    """Refuse results that cannot come back, or that would replace an output of the project's own pipeline."""
    from dvc.repo import Repo

    target = root / outputs
    with Repo(str(root)) as repo:
        outs = [Path(out.fs_path) for out in repo.index.outs]
    for out in outs:
        if target == out or target in out.parents or out in target.parents:
            allowed = f"a profile of another name: {out.relative_to(root)} is a result of profile {DEFAULT_PROFILE}"
            raise InputError("outputs", outputs, allowed)
    with claimed(target, EVERYTHING, option="outputs"):  # can it be written?
        pass


def _summary(schedule: Schedule, root: Path, seconds: float) -> str:
    if schedule.stopped_by:
        return f"stopped by {schedule.stopped_by} after {duration(seconds)}; the same command goes on from there"
    if not schedule.code:
        return f"done in {duration(seconds)}; results in {schedule.outputs}"
    logs = [f"{name} (log: {os.path.relpath(schedule.log_of(name), root)})" for name in schedule.failed]
    return f"failed after {duration(seconds)}: {', '.join(logs)}"


def _cache_folder(root: Path, config: Path) -> str:
    """The project's cache as DVC's settings in a folder name it: relative, so that no letter of the path matters."""
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return os.path.relpath(repo.cache.local_cache_dir, config)


def _project_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = os.fsdecode(subprocess.run(command, cwd=root, capture_output=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        raise InputError("project folder", str(root), "a git checkout (git lists the project's files)") from None
    # Results and their lock belong to the default profile. A tracked file may have been deleted since.
    names = sorted({name for name in listing.split("\0") if name and name.split("/")[0] not in ("outputs", "dvc.lock")})
    return [name for name in names if (root / name).is_file()]


def _with_profile(dvc_yaml: Path, profile: str) -> str:
    default = VARS_FILE.format(DEFAULT_PROFILE)
    try:
        text = dvc_yaml.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError("dvc.yaml", str(dvc_yaml), f"text in UTF-8 ({error.reason})") from None
    if text.count(default) != 1:
        raise InputError("dvc.yaml", f"{text.count(default)} times {default}", "exactly one mention, under vars")
    return text.replace(default, VARS_FILE.format(profile))


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
