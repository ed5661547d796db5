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


def suite_values(root: Path, profile: str) -> dict[str, Any]:
    """The values of a profile's ``suite.yaml``, checked: whose results it replaces, and how many stages run at once.

    Args:
        root: The project's root.
        profile: The profile.

    Returns:
        Its values, with those of the profile that it lies over.

    Raises:
        InputError: For an unknown profile, a file that cannot be read, or results in another folder than the profile's
            own: a copy of another profile's folder would replace that profile's results.
    """
    values, file = profile_values(root, profile, SUITE), f"params/{profile}/{SUITE}.yaml"
    default = profile_values(root, DEFAULT_PROFILE, SUITE).get("outputs")
    parts = Path(default).parts if isinstance(default, str) else ()
    if not parts or Path(default).is_absolute() or ".." in parts:
        raise InputError(f"params/{DEFAULT_PROFILE}/{SUITE}.yaml: outputs", default, "a folder of the project")
    own = default if profile == DEFAULT_PROFILE else f"{default}/{profile}"
    for key, allowed in (("outputs", own), ("profile", profile)):
        if values.get(key) != allowed:
            raise InputError(f"{file}: {key}", values.get(key), f"{allowed!r}, the profile's own")
    jobs = values.setdefault("jobs", 1)
    if type(jobs) is not int or jobs < 1:
        raise InputError(f"{file}: jobs", jobs, "a number of at least 1")
    return values


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
    read_yaml(folder / f"{SUITE}.yaml")  # follows every `over`, and says what is wrong with one
    below = yaml.safe_load((folder / f"{SUITE}.yaml").read_text(encoding="utf-8")) or {}
    over = below.get("over")
    return [folder, *(_folders(root, Path(str(over)).parent.name) if over else [])]
