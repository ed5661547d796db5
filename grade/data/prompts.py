"""Datasets of prompts: files, folders of `datasets`, and the Hugging Face hub.

A dataset of prompts has a column "prompt", with text or with lists of messages; its other columns reach the reward.
Files are read into memory. `datasets.load_dataset` reads them too, but writes them to its cache first, and tells
neither the line of a damaged file nor a text that it has turned into a number.

Left out: data that does not fit into memory, other than in a folder that ``save_to_disk`` wrote, which is mapped.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.parquet
from datasets import Dataset
from datasets.table import InMemoryTable

from grade.data.tables import check_table
from grade.errors import InputError
from grade.files import require_source

_HUB = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[^:]+))??(:(?P<split>[^:]+(\[.*\])?))?")
_SOURCES = "a file (.jsonl, .json, .csv, .parquet), a folder that save_to_disk wrote, or a hub id 'user/name'"


def load_prompts(source: str | Path, field: str = "prompts") -> Dataset:
    """A dataset with a column "prompt" and at least one row.

    ``source`` is a file: ``.jsonl`` (an object on every line), ``.json`` (the same, or a list of objects), ``.csv``
    (has a header; an empty field is None) or ``.parquet``; a folder that ``save_to_disk`` wrote; or the id of a dataset
    on the hub, ``user/name``, ``user/name:split`` or ``user/name:config:split``. Of several splits it is "train".
    ``field`` is for error messages.
    """
    dataset = load_rows(source, field)
    if "prompt" not in dataset.column_names:
        raise InputError(f"columns of {source}", dataset.column_names, 'one of them "prompt"')
    return dataset


def load_rows(source: str | Path, field: str) -> Dataset:
    """`load_prompts` of any columns."""
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        with _without_progress_bars():
            loaded = datasets.load_from_disk(path)
    elif path.is_file() and reader:
        loaded = reader(path, field)
    elif path.exists():
        raise InputError(field, str(source), _SOURCES)
    elif reader:
        raise InputError(field, str(source), "a file that exists")
    elif match := _HUB.fullmatch(str(source)):
        allowed = "a file or folder that exists, or a dataset on the hub that can be loaded"
        require_source(field, match["name"], allowed)
        with _without_progress_bars():
            loaded = datasets.load_dataset(match["name"], match["config"], split=match["split"])
    else:
        raise InputError(field, str(source), f"{_SOURCES}, that exists")
    if isinstance(loaded, dict):
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
        if split not in loaded:
            raise InputError("split", split, f"one of {', '.join(loaded)}, which {source} has")
        loaded = loaded[split]
    if not len(loaded):
        raise InputError(field, str(source), "a dataset with at least one row")
    return loaded


def _read_json(path: Path, field: str) -> Dataset:
    """A list of objects, or one object on every line; values of any types, also where rows differ."""
    rows = _rows(path, field)
    if not rows:
        raise InputError(field, str(path), "a file with at least one row")
    for place, row in rows.items():
        if not isinstance(row, dict):
            raise InputError(f"{path}, {place}", row, 'an object {"prompt": ...}')
    names = dict.fromkeys(name for row in rows.values() for name in row)  # in the order of the file
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    dataset = Dataset.from_dict(columns, on_mixed_types="use_json")
    for name, feature in dataset.features.items():
        # Where types are mixed, a text that is itself JSON comes back as what it says: "2" as 2.
        if "Json(" not in str(feature):
            continue
        for place, before, after in zip(rows, columns[name], dataset[name], strict=True):
            if before != after:
                raise InputError(f"{path}, {place}, {name}", before, "values of one type in the whole column")
    return dataset


def _rows(path: Path, field: str) -> dict[str, Any]:
    """What a JSON file holds by the place in it: "line 3", or "row 2" of a list."""
    data, rows = path.read_bytes(), {}
    if path.suffix.lower() == ".json" and data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return {f"row {number}": row for number, row in enumerate(_json(data))}
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                rows[f"line {number}"] = _json(line)
            except ValueError as error:
                allowed = f"JSON in UTF-8: a list of objects, or one object on every line ({error})"
                raise InputError(field, f"{path}, line {number}", allowed) from None
    return rows


def _json(data: bytes) -> Any:
    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise ValueError(f"two values of {max(names, key=names.count)!r}")
        return dict(pairs)

    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=read)


def _read_csv(path: Path, field: str) -> Dataset:
    """Columns are text, unless every field is read back as it is written, but for its case and a final ``.0``.

    So 1.5 and true keep their types, while 007 and 1.50 are not lost; prompts and completions are always text.
    """
    read = functools.partial(
        pd.read_csv, path, keep_default_na=False, na_values=[""], dtype_backend="numpy_nullable", low_memory=False,
        float_precision="round_trip",
    )  # fmt: skip
    check_table(path)
    frame, written = read(dtype=dict.fromkeys(("prompt", "completion"), str)), read(dtype=str)
    for name in frame:
        texts = (column.astype("string").str.lower() for column in (frame[name], written[name]))
        back, before = (text.str.removesuffix(".0") for text in texts)
        if not back.equals(before):
            frame[name] = written[name]
    return Dataset.from_pandas(frame, preserve_index=False)


def _read_parquet(path: Path, field: str) -> Dataset:
    table = pyarrow.parquet.read_table(path)
    table.validate(full=True)  # else a text that is not UTF-8 is found hours later, where its row is drawn
    return Dataset(InMemoryTable(table))


_READERS: dict[str, Callable[[Path, str], Dataset]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
