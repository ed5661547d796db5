"""A profile: its parameters, the copy of the project in which its pipeline runs, and publishing what it found.

Files under ``params/<profile>`` hold only what differs from another profile. A file says over which other file it lies
(``over: ../cpu/train.yaml``; `grade.config_files.read_yaml` follows it). Where a profile's ``suite.yaml`` lies over
another profile's and a file is missing, nothing differs.

Every profile runs in ``.workspaces/<profile>``, which git ignores: a run leaves the project as it was, whatever the
processor rounds. The copy's ``dvc.yaml`` names the profile. `repro` is DVC's own command there: it runs what has
changed, and goes on at the stage in which it was interrupted. The copy shares DVC's cache with the project. `publish`
copies results to ``outputs/``. ``dvc repro`` in the project itself is profile ``cpu`` in place.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grade.config import allowed_names
from grade.config_files import parse_yaml, read_yaml
from grade.errors import InputError
from grade.files import atomic, write_text

DEFAULT_PROFILE = "cpu"
_SUITE = "params/{}/suite.yaml"


def profiles(root: Path) -> list[str]:
    """Names of the profiles: folders under ``params`` with a ``suite.yaml``."""
    return sorted(path.parent.name for path in root.glob("params/*/suite.yaml"))


def profile_values(root: Path, profile: str, name: str) -> dict[str, Any]:
    """The values of one of a profile's files, ``<name>.yaml``, complete; empty where no file has that name."""
    if profile not in profiles(root):
        allowed = ", ".join(profiles(root)) or "those of a checkout: there is no params/*/suite.yaml here"
        raise InputError("profile", profile, f"one of {allowed}")
    for folder in _folders(root, profile):
        if (folder / f"{name}.yaml").is_file():
            return read_yaml(folder / f"{name}.yaml")
    return {}


def suite_values(root: Path, profile: str) -> dict[str, Any]:
    """The values of a profile's ``suite.yaml``.

    Results in another folder than the profile's own are refused: a copied profile would replace another's results.
    """
    values = profile_values(root, profile, "suite")
    own = {"outputs": "outputs" if profile == DEFAULT_PROFILE else f"outputs/{profile}", "profile": profile}
    for key, allowed in own.items():
        if values.get(key) != allowed:
            raise InputError(f"params/{profile}/suite.yaml: {key}", values.get(key), f"{allowed!r}, the profile's own")
    others = {"alone": {}, "experiments": {}, "runs": [], "seeds": [], "studies": []}
    for key in values.keys() - {*own, *others}:
        raise InputError(f"params/{profile}/suite.yaml", key, allowed_names(key, [*own, *others]))
    values = others | values
    read = {path.stem for path in (root / "params" / DEFAULT_PROFILE).glob("*.yaml")}
    read |= {*values["alone"], *values["experiments"], *values["studies"], *(f"train_{run}" for run in values["runs"])}
    for name in sorted(path.stem for path in (root / "params" / profile).glob("*.yaml")):
        if name not in read:
            allowed = allowed_names(name, sorted(read))
            raise InputError(f"params/{profile}", f"{name}.yaml", f"files of the pipeline: {allowed}")
    return values


def resolved_files(root: Path, profile: str) -> dict[str, str]:
    """Name and text of every parameter file of a profile as DVC can read it: complete, without another file below it.

    A name that only the default profile has is an empty mapping.
    """
    folders = {root / "params" / DEFAULT_PROFILE, *_folders(root, profile)}
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    values = {name: profile_values(root, profile, name) for name in names}
    return {f"{name}.yaml": json.dumps(values[name], indent=1, ensure_ascii=False) + "\n" for name in names}  # is YAML


def _folders(root: Path, profile: str) -> list[Path]:
    """The profile's folder, and those that its suite lies over, nearest first."""
    folder = root / "params" / profile
    read_yaml(folder / "suite.yaml")  # follows every `over`, and says what is wrong with one
    over = (parse_yaml((folder / "suite.yaml").read_text(encoding="utf-8")) or {}).get("over")
    return [folder, *(_folders(root, Path(str(over)).parent.name) if over else [])]


def workspace_of(root: Path, profile: str) -> Path:
    """Where a profile runs; it may be a link to another disk."""
    return (root / ".workspaces" / profile).resolve()


def prepare_workspace(root: Path, profile: str) -> Path:
    """Make or refresh a profile's workspace, and return it.

    It gets the project's files as they are now (tracked, or untracked and not ignored) without its results; what the
    workspace made itself stays.
    """
    if not (root / "dvc.yaml").is_file():
        raise InputError("working folder", str(root), "the project's root, the folder with dvc.yaml")
    suite_values(root, profile)
    suite = _SUITE.format(DEFAULT_PROFILE)
    pipeline = (root / "dvc.yaml").read_text(encoding="utf-8")
    files, workspace = _project_files(root), workspace_of(root, profile)
    workspace.mkdir(parents=True, exist_ok=True)
    manifest = workspace / ".workspace-files"  # what was copied last time, so that what is gone can go here too
    if manifest.exists():
        for name in set(os.fsdecode(manifest.read_bytes()).split("\0")) - {*files, ""}:
            (workspace / name).unlink(missing_ok=True)
    own = f"params/{profile}/"
    for name in files:
        if name != "dvc.yaml" and not name.startswith(own):
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, workspace / name)  # with its time, by which DVC knows what not to hash again
    texts = {own + name: text for name, text in resolved_files(root, profile).items()}
    texts["dvc.yaml"] = pipeline.replace(suite, _SUITE.format(profile))
    # None of git's business: what is ignored in the project may be an output here.
    cache = os.path.relpath(_cache_folder(root), workspace / ".dvc")  # relative, so that no letter of it matters
    texts[".dvc/config.local"] = f"[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n"
    for name, text in texts.items():
        if not (workspace / name).is_file() or (workspace / name).read_text(encoding="utf-8") != text:
            write_text(workspace / name, text)
    manifest.write_bytes(b"".join(os.fsencode(f"{name}\0") for name in files))
    return workspace


def repro(root: Path, profile: str, stages: Sequence[str] = ()) -> int:
    """Run ``dvc repro`` in a profile's workspace: all stages, or those that are named with what they need."""
    place = prepare_workspace(root, profile)
    environment = dict(
        os.environ,
        # Stages call `python`; it has to be this one, with or without an activated environment.
        PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        # The workspace's own copy of the package, not an installed one.
        PYTHONPATH=os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")])),
    )
    environment.setdefault("OMP_NUM_THREADS", "1")  # the published figures': sums over threads are in another order
    return subprocess.run([sys.executable, "-m", "dvc", "repro", *stages], cwd=place, env=environment).returncode


def publish(root: Path, profile: str) -> list[Path]:
    """Copy a workspace's results into the project, and for the default profile ``dvc.lock``; return what was copied.

    Results are what is kept in git: small outs of the stages, executed notebooks, times, and the page of results.
    """
    from dvc.repo import Repo

    outputs, workspace = suite_values(root, profile)["outputs"], workspace_of(root, profile)
    if not (workspace / "dvc.lock").is_file():
        raise InputError("profile", profile, f"one that has run: `grade repro {profile}`")
    with Repo(str(workspace)) as repo:
        outs = [out for out in repo.index.outs if not out.use_cache or out.fs_path.endswith(".ipynb")]
        for out in outs:
            for state in out.workspace_status().values():
                allowed = f"one of which every stage has run, with the results that it wrote: {out} is {state}"
                raise InputError("profile", profile, allowed)
    results = [Path(out.fs_path) for out in outs]
    results += sorted(path for path in (workspace / outputs).glob("*.*") if path.is_file())  # the page of results
    results += sorted((workspace / outputs).glob("*/**/timings*"))
    if profile == DEFAULT_PROFILE:
        results.append(workspace / "dvc.lock")
    names = [path.relative_to(workspace) for path in results]
    for name in names:
        with atomic(root / name) as staging:
            copy = shutil.copytree if (workspace / name).is_dir() else shutil.copyfile
            copy(workspace / name, staging)
    return names


def _cache_folder(root: Path) -> str:
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return repo.cache.local_cache_dir


def _project_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = os.fsdecode(subprocess.run(command, cwd=root, capture_output=True, check=True).stdout)
    # Results and their lock are the project's own. A tracked file may have been deleted since.
    own = ("outputs/", "dvc.lock")
    names = sorted(name for name in set(listing.split("\0")) if not name.startswith(own))
    return [name for name in names if (root / name).is_file()]
