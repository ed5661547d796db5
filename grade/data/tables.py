"""Tables in files, separated by commas."""

import csv
from pathlib import Path


def check_table(path: Path) -> None:
    """Refuse what pandas reads in silence: two columns of one name, rows of more or fewer fields than the header."""
    csv.field_size_limit(2**31 - 1)  # a text may be longer than 128 KiB
    with path.open(encoding="utf-8-sig") as file:
        rows = csv.reader(map(str.rstrip, file))
        header = next(filter(None, rows), [])
        for name in header:
            if header.count(name) > 1:
                raise ValueError(f"{path}: two columns {name!r}")
        for row in rows:
            if len(row) not in (0, len(header)):
                raise ValueError(f"{path}: {len(row)} fields in line {rows.line_num}, {len(header)} in the header")
