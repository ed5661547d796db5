"""Datasets of prompts: files, folders of `datasets`, and the Hugging Face hub.

A dataset of prompts has a column "prompt", with text or with lists of messages; its other columns reach the reward.
Files are read into memory, by json and pandas: `datasets.load_dataset` does not tell of a text that it has turned into
a number.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.parquet
from datasets import Dataset
from datasets.table import InMemoryTable

from grade.data.tables import check_table
from grade.errors import InputError

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
    if path.is_dir():
        loaded = datasets.load_from_disk(path)
    elif reader := _READERS.get(path.suffix.lower()):
        loaded = reader(path)
    elif match := _HUB.fullmatch(str(source)):
        loaded = datasets.load_dataset(match["name"], match["config"], split=match["split"])
    else:
        raise InputError(field, str(source), _SOURCES)
    if isinstance(loaded, dict):
        split = next(iter(loaded)) if len(loaded) == 1 else "train"
        if split not in loaded:
            raise InputError("split", split, f"one of {', '.join(loaded)}, which {source} has")
        loaded = loaded[split]
    if not len(loaded):
        raise InputError(field, str(source), "a dataset with at least one row")
    return loaded


def _read_json(path: Path) -> Dataset:
    """A list of objects, or one object on every line; values of any types, also where rows differ."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        rows = {f"row {number}": row for number, row in enumerate(json.loads(text))}
    else:
        lines = enumerate(text.split("\n"), 1)
        rows = {f"line {number}": _json(line, f"{path}, line {number}") for number, line in lines if line.strip()}
    for where, row in rows.items():
        if not isinstance(row, dict):
            raise InputError(f"{path}, {where}", row, 'an object {"prompt": ...}')
    names = dict.fromkeys(name for row in rows.values() for name in row)  # in the order of the file
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    dataset = Dataset.from_dict(columns, on_mixed_types="use_json")
    for name, feature in dataset.features.items():
        # Where types are mixed, a text that is itself JSON comes back as what it says: "2" as 2.
        if "Json(" not in str(feature):
            continue
        for where, before, after in zip(rows, columns[name], dataset[name], strict=True):
            if before != after:
                raise InputError(f"{path}, {where}, {name}", before, "values of one type in the whole column")
    return dataset


def _json(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(where, line, f"JSON: a list of objects, or one object on every line ({error})") from error


def _read_csv(path: Path) -> Dataset:
    """Columns are text, unless every field is read back as it is written, but for its case and a final ``.0``.

    So 1.5 and true keep their types, while 007 and 1.50 are not lost; prompts and completions are always text.
    """
    check_table(path)
    read = functools.partial(
        pd.read_csv, path, keep_default_na=False, na_values=[""], dtype_backend="numpy_nullable", low_memory=False,
        float_precision="round_trip",
    )  # fmt: skip
    frame, written = read(dtype=dict.fromkeys(("prompt", "completion"), str)), read(dtype=str)
    for name in frame:
        texts = (column.astype("string").str.lower() for column in (frame[name], written[name]))
        back, before = (text.str.removesuffix(".0") for text in texts)
        if not back.equals(before):
            frame[name] = written[name]
    return Dataset.from_pandas(frame, preserve_index=False)


def _read_parquet(path: Path) -> Dataset:
    return Dataset(InMemoryTable(pyarrow.parquet.read_table(path)))


_READERS: dict[str, Callable[[Path], Dataset]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
