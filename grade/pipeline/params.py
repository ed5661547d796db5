"""Parameters of a profile: files under ``params/<profile>``, which hold only what differs from another profile.

A file says over which other file it lies (``over: ../cpu/train.yaml``; `grade.config.read_yaml` follows it). Where a
profile's ``suite.yaml`` lies over another profile's and a file is missing, nothing differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grade.config import read_yaml
from grade.errors import InputError

DEFAULT_PROFILE = "cpu"
SUITE = "suite"


def profiles(root: Path) -> list[str]:
    """Names of the profiles: folders under ``params`` with a ``suite.yaml``."""
    return sorted(path.parent.name for path in root.glob(f"params/*/{SUITE}.yaml"))


def profile_values(root: Path, profile: str, name: str) -> dict[str, Any]:
    """The values of one of a profile's files.

    Args:
        root: The project's root.
        profile: The profile.
        name: The file's name without its ending, for example an experiment's.

    Returns:
        Its values, with those of the profile that it lies over; empty where neither has the file.

    Raises:
        InputError: For an unknown profile or a file that cannot be read.
    """
    if profile not in profiles(root):
        raise InputError("profile", profile, f"one of {', '.join(profiles(root))}")
    for folder in _folders(root, profile):
        if (folder / f"{name}.yaml").is_file():
            return read_yaml(folder / f"{name}.yaml")
    return {}


def resolved_files(root: Path, profile: str) -> dict[str, str]:
    """Every parameter file of a profile as DVC can read it: complete, without another file below it.

    Args:
        root: The project's root.
        profile: The profile.

    Returns:
        File names to their text; a name that only the default profile has is an empty mapping.
    """
    folders = {root / "params" / DEFAULT_PROFILE, *_folders(root, profile)}
    names = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    return {f"{name}.yaml": yaml.safe_dump(profile_values(root, profile, name), sort_keys=False) for name in names}


def _folders(root: Path, profile: str) -> list[Path]:
    """The profile's folder, and those that its suite lies over, nearest first."""
    folder = root / "params" / profile
    suite = yaml.safe_load((folder / f"{SUITE}.yaml").read_text(encoding="utf-8")) or {}
    below = suite.get("over")
    return [folder, *(_folders(root, Path(below).parent.name) if below else [])]
