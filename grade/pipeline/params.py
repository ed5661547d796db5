"""Parameters of a profile: files under ``params/<profile>``, which hold only what differs from another profile.

A file says over which other file it lies (``over: ../cpu/train.yaml``; `grade.config.read_yaml` follows it). Where a
profile's ``suite.yaml`` lies over another profile's and a file is missing, nothing differs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grade.config import parse_yaml, read_yaml
from grade.errors import InputError

DEFAULT_PROFILE = "cpu"


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
    for key, default in {"alone": {}, "experiments": {}, "jobs": 1}.items():
        if type(values.setdefault(key, default)) is not type(default):
            raise InputError(f"params/{profile}/suite.yaml: {key}", values[key], f"a value such as {default}")
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
