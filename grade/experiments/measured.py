"""The tables of an experiment: measured once, written, read.

An experiment's ``measure/tables.py`` has `Settings`, a config of everything that its numbers depend on, whose defaults
are a smoke test, and `Measurements`, each of whose tables is a method. Nothing below ``measure`` knows a figure or a
claim, so neither ever costs a measurement. Times differ from run to run: tables that hold them go to a folder
``timings`` of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import pandas as pd

from grade.config import Config
from grade.errors import InputError
from grade.results import environment, replacing

Table = pd.DataFrame | dict[str, Any]
S = TypeVar("S", bound=Config)


class Measurements(Generic[S]):
    """The tables of one experiment, measured with one setting.

    A subclass names its tables in `tables` and `timed` and has a method without arguments for each, which returns a
    frame (rows in a meaningful order, a plain index) or a dict of plain values. Models that several tables share are
    `functools.cached_property`.

    Attributes:
        tables: Names of the tables that are the same whenever they are measured again.
        timed: Names of those that hold seconds.
        settings: What they are measured with.
    """

    tables: ClassVar[tuple[str, ...]] = ()
    timed: ClassVar[tuple[str, ...]] = ()
    Settings: ClassVar[type[Config]]

    def __init__(self, settings: S) -> None:
        self.settings = settings


def measure_all(measurements: Measurements, folder: str | Path, log: Callable[[str], None] = print) -> None:
    """Measure every table and write it: ``measured/<name>.csv`` or ``.json``, times below ``timings/``.

    Args:
        measurements: An experiment's.
        folder: Its folder of results.
        log: Receives the name of each table before it is measured.
    """
    folder = Path(folder)
    for name in (*measurements.tables, *measurements.timed):
        log(f"measuring {name}")
        place = folder / ("timings" if name in measurements.timed else "measured")
        write_table(place / name, getattr(measurements, name)())
    write_environment(folder / "timings" / "measured_on.json")


def write_table(stem: str | Path, table: Table) -> None:
    """Write a frame as ``<stem>.csv`` and a dict as ``<stem>.json``, numbers in full.

    Args:
        stem: Path without an ending; its folder is made.
        table: What to write.
    """
    if isinstance(table, pd.DataFrame):
        with replacing(f"{stem}.csv") as file:
            table.to_csv(file, index=False, lineterminator="\n")
    else:
        with replacing(f"{stem}.json") as file:
            file.write(json.dumps(table, indent=1, default=lambda number: number.item()) + "\n")


def read_table(stem: str | Path) -> Table:
    """Read what `write_table` wrote; numbers come back bit by bit.

    Args:
        stem: Path without an ending.

    Returns:
        The frame or the dict.

    Raises:
        InputError: If there is neither.
    """
    stem = Path(stem)
    if stem.with_name(f"{stem.name}.csv").is_file():
        return pd.read_csv(f"{stem}.csv", float_precision="round_trip", keep_default_na=False, na_values=[""])
    if stem.with_name(f"{stem.name}.json").is_file():
        return json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    raise InputError("table", str(stem), "a table that `python -m grade measure` has written (.csv or .json)")


class Tables(Mapping[str, Table]):
    """Tables by name: read from a folder of results, or measured when they are first asked for."""

    def __init__(self, measurements: Measurements, measured_dir: str = "") -> None:
        self._measurements, self._folder, self._known = measurements, measured_dir, {}

    def __getitem__(self, name: str) -> Table:
        measurements = self._measurements
        if name not in (*measurements.tables, *measurements.timed):
            raise KeyError(name)
        if name not in self._known:
            if self._folder:
                folder = Path(self._folder)
                folder = folder.parent / "timings" if name in measurements.timed else folder
                self._known[name] = read_table(folder / name)
            else:
                self._known[name] = getattr(measurements, name)()
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._measurements.tables, *self._measurements.timed))

    def __len__(self) -> int:
        return len(self._measurements.tables) + len(self._measurements.timed)


def progress(items: Iterable[Any], description: str) -> Iterable[Any]:
    """A progress bar over items for a person who waits; none in a pipeline, whose output must not hold times.

    Args:
        items: What to go through.
        description: What is done with them.

    Returns:
        The items.
    """
    from tqdm.auto import tqdm

    quiet = os.environ.get("GRADE_PROGRESS") == "0"
    return tqdm(items, desc=description, leave=False, disable=quiet)


def write_environment(path: str | Path) -> None:
    """Write what the numbers of a run depend on besides code and parameters; see `grade.results.environment`."""
    with replacing(path) as file:
        file.write(json.dumps(environment(), indent=1) + "\n")
