"""Datasets of prompts: files, folders of `datasets`, and the Hugging Face hub.

A dataset of prompts has a column "prompt", with text or with lists of messages; its other columns reach the reward.
Files are read into memory: nothing is written to the cache of `datasets`.

Left out: data that does not fit into memory, other than in a folder that ``save_to_disk`` wrote, which is mapped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grade.errors import InputError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_HUB = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[^:]+))??(:(?P<split>[^:]+(\[.*\])?))?")
_SOURCES = "a file (.jsonl, .json, .csv, .parquet), a folder that save_to_disk wrote, or a hub id 'user/name'"


def load_prompts(source: str | Path, split: str | None = None) -> Dataset:
    """Load a dataset that has a column "prompt".

    Args:
        source: A file: ``.jsonl`` (an object on every line), ``.json`` (the same, or a list of objects), ``.csv`` (has
            a header; an empty field is None) or ``.parquet``; a folder that ``save_to_disk`` wrote; or the id of a
            dataset on the Hugging Face hub, ``user/name``, ``user/name:split`` or ``user/name:config:split``.
        split: Which split. Default: the only one, otherwise "train". A file is one split, "train".

    Returns:
        The dataset, at least one row.

    Raises:
        InputError: If there is no such source, it cannot be read, has no column "prompt" or no rows, or if there is no
            such split. For a damaged ``.json`` file the message names the line.
    """
    path = Path(source)
    reader = _READERS.get(path.suffix.lower())
    if path.is_dir():
        dataset = _from_folder(path, split)
    elif path.is_file() and reader:
        dataset = _chosen(reader(path), split, path)
    elif path.exists():
        raise InputError("prompts", str(source), _SOURCES)
    elif reader:
        raise InputError("prompts", str(source), "a file that exists")
    elif match := _HUB.fullmatch(str(source)):
        dataset = _from_hub(**match.groupdict(), asked=split)
    else:
        raise InputError("prompts", str(source), f"{_SOURCES}, that exists")
    if "prompt" not in dataset.column_names:
        raise InputError(f"columns of {source}", dataset.column_names, 'one of them "prompt"')
    if not len(dataset):
        raise InputError("prompts", str(source), "a dataset with at least one row")
    return dataset


def _read_json(path: Path) -> Dataset:
    """A list of objects, or one object on every line; values of any types, also where rows differ."""
    rows = _rows(path)
    lines = list(rows)
    if not lines:
        raise InputError("prompts", str(path), "a file with at least one row")
    from datasets import Dataset

    names = dict.fromkeys(name for row in rows.values() for name in row)  # in the order of the file
    columns = {name: [row.get(name) for row in rows.values()] for name in names}
    try:
        dataset = Dataset.from_dict(columns, on_mixed_types="use_json")
    except (ValueError, TypeError, OverflowError, NotImplementedError) as error:
        raise InputError("prompts", str(path), f"values that Arrow can hold ({_reason(error)})") from None
    for name, feature in dataset.features.items():
        # Where types are mixed, a text that is itself JSON comes back as what it says: "2" as 2.
        if "Json(" not in str(feature):
            continue
        for line, before, after in zip(lines, columns[name], dataset[name], strict=True):
            if before != after:
                raise InputError(f"{path}, {line}, {name}", before, "values of one type in the whole column")
    return dataset


def _rows(path: Path) -> dict[str, dict[str, Any]]:
    """The objects of a JSON file by their place in it: "line 3", or "row 2" of a list."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError("prompts", str(path), f"a file that can be read ({_reason(error)})") from None
    if path.suffix.lower() == ".json" and data.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        parsed = _parsed(data, path, None)
        places = {f"row {number}": row for number, row in enumerate(parsed)}
    else:
        lines = enumerate(data.split(b"\n"), 1)
        places = {f"line {number}": _parsed(line, path, number) for number, line in lines if line.strip()}
    for place, row in places.items():
        if not isinstance(row, dict):
            raise InputError(f"{path}, {place}", row, 'an object {"prompt": ...}')
    return places


def _parsed(data: bytes, path: Path, line: int | None) -> Any:
    """JSON from bytes in UTF-8. ``line``: the number of the only line; None: the whole file."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        number = line or data.count(b"\n", 0, error.start) + 1
        raise InputError("prompts", f"{path}, line {number}", "text in UTF-8") from None
    except json.JSONDecodeError as error:
        number = line or error.lineno
        allowed = f"JSON: a list of objects, or one object on every line ({error.msg})"
        raise InputError("prompts", f"{path}, line {number}", allowed) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists in lists
        raise InputError("prompts", str(path), f"JSON that can be read ({_reason(error)})") from None


def _read_csv(path: Path) -> Dataset:
    """Fields keep their type if a whole column has it; prompts are text, also "12" and "NA"."""
    import pandas as pd
    from datasets import Dataset

    try:
        frame = pd.read_csv(
            path, dtype={"prompt": str}, keep_default_na=False, na_values=[""], dtype_backend="numpy_nullable"
        )
        if not isinstance(frame.index, pd.RangeIndex):  # pandas takes surplus fields for names of the rows
            raise ValueError("more fields than the header has: quote a text that holds a comma")
        return Dataset.from_pandas(frame, preserve_index=False)
    except (ValueError, OSError) as error:
        raise InputError("prompts", str(path), f"a table in UTF-8, separated by commas ({_reason(error)})") from None


def _read_parquet(path: Path) -> Dataset:
    import pyarrow.parquet
    from datasets import Dataset
    from datasets.table import InMemoryTable

    try:
        return Dataset(InMemoryTable(pyarrow.parquet.read_table(path)))
    except (ValueError, OSError, NotImplementedError) as error:
        raise InputError("prompts", str(path), f"a parquet file ({_reason(error)})") from None


_READERS: dict[str, Callable[[Path], Dataset]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _from_folder(path: Path, split: str | None) -> Dataset:
    import datasets

    try:
        with _without_progress_bars():
            loaded = datasets.load_from_disk(path)
    except Exception as error:  # the package has no class of its own for a damaged folder
        allowed = f"a folder that save_to_disk wrote, or a file in it ({_reason(error)})"
        raise InputError("prompts", str(path), allowed) from None
    return _chosen(loaded, split, path)


def _from_hub(name: str, config: str | None, split: str | None, asked: str | None) -> Dataset:
    import datasets

    if split and asked and split != asked:
        raise InputError("split", asked, f"{split}, as the source says, or none")
    split = split or asked
    try:
        with _without_progress_bars():
            loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub, the file formats and the network each have their own classes
        allowed = f"a file or folder that exists, or a dataset on the hub that can be loaded ({_reason(error)})"
        raise InputError("prompts", ":".join(filter(None, (name, config, split))), allowed) from None
    return loaded if split else _chosen(loaded, split, name)


def _chosen(loaded: Dataset | DatasetDict, split: str | None, source: str | Path) -> Dataset:
    """One split; by default the only one, otherwise "train"."""
    splits = loaded if isinstance(loaded, dict) else {str(loaded.split or "train"): loaded}
    if split is None:
        split = next(iter(splits)) if len(splits) == 1 else "train"
    if split not in splits:
        raise InputError("split", split, f"one of {', '.join(splits)}, which {source} has")
    return splits[split]


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
