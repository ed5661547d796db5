"""The tables of an experiment: measured once, written, read.

An experiment is a module ``grade.experiments.<name>.measure.tables`` with `Settings`, a config of everything that its
numbers depend on, whose defaults are a smoke test, and two dicts of functions of these settings, one for each table:
``TABLES``, and ``TIMED`` for those that hold seconds, which differ from run to run and go to a folder ``timings`` of
their own. A function returns a frame (rows in a meaningful order, a plain index), a dict of plain values, or None where
these settings have no such table. Models that several tables share are a `functools.cached_property` of the settings.

Nothing below ``measure`` knows a figure or a claim, so neither ever costs a measurement.
"""

import json
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import IO, Annotated, Any

import pandas as pd
from pydantic import Field

from grade.errors import InputError
from grade.files import write_text
from grade.results import environment

Size = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
"""Kinds of a setting: a number of things, of things whose spread is measured, of things of which there may be none; a
number above 0; one from 0 to 1."""
Table = pd.DataFrame | dict[str, Any]


def measure_all(
    experiment: ModuleType, settings: Any, folder: str | Path, log: Callable[[str], None] = print
) -> None:  # fmt: skip
    """Measure every table and write it: ``measured/<name>.csv`` or ``.json``, times below ``timings/``."""
    for place, tables in (("measured", experiment.TABLES), ("timings", experiment.TIMED)):
        for name, measure in tables.items():
            log(f"measuring {name}")
            table = measure(settings)
            if table is not None:
                write_table(Path(folder, place, name), table)
    write_environment(Path(folder, "timings", "measured_on.json"))


def write_table(stem: str | Path, table: Table) -> None:
    """Write a frame as ``<stem>.csv`` and a dict as ``<stem>.json``, numbers in full."""
    if isinstance(table, pd.DataFrame):
        write_text(f"{stem}.csv", table.to_csv(index=False, lineterminator="\n"))
    else:
        write_text(f"{stem}.json", json.dumps(table, indent=1, default=lambda number: number.item()) + "\n")


def read_table(stem: str | Path) -> Table:
    """Read what `write_table` wrote; numbers come back bit by bit."""
    for path in (Path(f"{stem}.csv"), Path(f"{stem}.json")):
        if path.is_file():
            return read_csv(path) if path.suffix == ".csv" else json.loads(path.read_text(encoding="utf-8"))
    raise InputError("table", str(stem), "a table that `python -m grade measure` has written (.csv or .json)")


def read_csv(file: str | IO[str]) -> pd.DataFrame:
    """A frame whose numbers are those that were written, bit by bit; only an empty cell is NaN."""
    return pd.read_csv(file, float_precision="round_trip", keep_default_na=False, na_values=[""])


def published_text(path: str | Path, revision: str = "HEAD") -> str | None:
    """A text file as a git revision has it, by its path from the project's root; None if there is none."""
    show = subprocess.run(["git", "show", f"{revision}:{Path(path).as_posix()}"], capture_output=True, text=True)
    return show.stdout if show.returncode == 0 else None


class Tables(Mapping[str, Table]):
    """Tables by name: read from a folder of results, or measured when they are first asked for."""

    def __init__(self, experiment: ModuleType, settings: Any, measured_dir: str = "") -> None:
        self._settings, self._known, self._measures = settings, {}, {**experiment.TABLES, **experiment.TIMED}
        self._stems = {name: Path(measured_dir).parent / ("timings" if name in experiment.TIMED else "measured") / name
                       for name in self._measures if measured_dir}  # fmt: skip

    def __getitem__(self, name: str) -> Table:
        if name not in self._known:
            measure = self._measures[name]
            self._known[name] = read_table(self._stems[name]) if self._stems else measure(self._settings)
        return self._known[name]

    def __contains__(self, name: object) -> bool:
        """Whether a folder of results has the table; without a folder all can be measured."""
        known = name in self._measures
        return known and (not self._stems or any(self._stems[name].parent.glob(f"{name}.*")))

    def get(self, name: str, default: Any = None) -> Any:
        """A table, or the default where the results have none."""
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._measures)

    def __len__(self) -> int:
        return len(self._measures)


def figures_of(table: pd.DataFrame, key: str, columns: Mapping[str, str] | Iterable[str]) -> dict[str, Any]:
    """Cells as figures by name: ``key``, which holds columns' names in braces, then the end that a column has.

    Columns that are not a mapping of ends to columns end in ``/<column>``.

    >>> figures_of(pd.DataFrame(dict(T=[8], mean=[0.5])), "gain/T{T}", ["mean"])
    {'gain/T8/mean': 0.5}
    """
    ends = columns if isinstance(columns, Mapping) else {f"/{column}": column for column in columns}
    rows = table.to_dict("records")
    return {key.format(**row) + end: row[column] for row in rows for end, column in ends.items()}


def finite(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with None for what does not exist: None itself, or NaN or an infinity."""
    return {name: value if value is not None and math.isfinite(value) else None for name, value in figures.items()}


def write_environment(path: str | Path) -> None:
    """Write what the numbers of a run depend on besides code and parameters; see `grade.results.environment`."""
    write_text(path, json.dumps(environment(), indent=1) + "\n")
