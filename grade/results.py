"""Result files: ``metrics.json`` and ``history.csv``, the same bytes for the same numbers on every machine; progress.

Floats are rounded to 6 significant digits, because the last digits differ between machines and would show up as
changes; keys are sorted; files are replaced in one step. What is left out on purpose: wall-clock dates, host names and
paths. They say nothing about a result, and would make every file differ.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grade.errors import InputError
from grade.files import read_json, write_text

if TYPE_CHECKING:
    from tqdm import tqdm


Value = float | int | str | bool | None

SIGNIFICANT_DIGITS = 6


def write_metrics(path: str | Path, flat: Mapping[str, Value]) -> None:
    """Write metrics as JSON: ``{"train/ste/kl": 0.1}`` becomes ``{"train": {"ste": {"kl": 0.1}}}``.

    `InputError`, and nothing written, for a value that is not finite or of another type.
    """
    nested: dict[str, Any] = {}
    for name in sorted(flat):
        *levels, leaf = name.split("/")
        inner = nested
        for level in levels:
            inner = inner.setdefault(level, {})
        inner[leaf] = _rounded(name, flat[name])
    write_text(path, json.dumps(nested, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def write_results(path: str | Path, flat: Mapping[str, Value]) -> None:
    """Write metrics, with what differs from run to run in ``timings.json`` beside them.

    Results stay the same bytes when they are made again: names that end in seconds or memory of the process, and the
    environment, stand apart.
    """
    timed = {name: value for name, value in flat.items() if is_timed(name)}
    write_metrics(path, {name: value for name, value in flat.items() if name not in timed})
    about = {f"environment/{name}": value for name, value in environment().items()}
    write_metrics(Path(path).with_name("timings.json"), timed | about)


def is_timed(name: str) -> bool:
    """Whether a metric differs from run to run.

    >>> is_timed("fit/feature_seconds"), is_timed("peak_memory_bytes"), is_timed("val/reward_mean")
    (True, True, False)
    """
    leaf = name.rpartition("/")[2]
    return "seconds" in leaf or "peak_memory" in leaf


def read_metrics(path: str | Path) -> dict[str, Value]:
    """Read metrics back to flat names: the inverse of `write_metrics`."""
    return dict(_flatten(read_json(path)))


def write_history(path: str | Path, rows: Sequence[Mapping[str, Value]]) -> None:
    """Write one row per step as CSV: columns as first seen, an empty field for None or what a row lacks."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    rounded = [{name: _rounded(name, value) for name, value in row.items()} for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rounded)
    write_text(path, text.getvalue())


def environment() -> dict[str, Value]:
    """What a number depends on besides code and parameters, without naming the machine; ``device`` is cpu or a GPU."""
    import torch

    return {
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "peft")},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def timeless() -> bool:
    """Whether what is printed must not hold times, as in an executed notebook: GRADE_PROGRESS is 0."""
    return os.environ.get("GRADE_PROGRESS") == "0"


def progress(items: Iterable[Any] | None, description: str, delay: float = 0.0) -> tqdm:
    """A bar on a terminal or in a notebook, after ``delay`` seconds, over items or for a caller that updates it."""
    from tqdm.auto import tqdm

    quiet = True if timeless() else None  # None: where somebody sees it
    return tqdm(items, desc=description, leave=False, disable=quiet, delay=delay)


def _rounded(name: str, value: Any) -> Value:
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    raise InputError(name, value, "a finite number, a string, a boolean or None")


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in nested.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def _commit() -> str | None:
    """The commit of this package's code; None where the repository around it does not have this file."""
    file = Path(__file__)
    command = ["git", "-C", str(file.parent), "rev-parse", "HEAD", f"HEAD:./{file.name}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return None
