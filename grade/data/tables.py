"""Tables in files, separated by commas."""

import csv
from pathlib import Path


def check_table(path: Path) -> None:
    """Refuse rows of more or fewer fields than the header, which pandas reads in silence: a comma without quotes."""
    csv.field_size_limit(2**31 - 1)  # a text may be longer than 128 KiB
    with path.open(encoding="utf-8-sig") as file:
        rows = csv.reader(map(str.rstrip, file))
        header = next(filter(None, rows), [])
        for row in rows:
            if len(row) not in (0, len(header)):
                found = f"{len(row)} fields in line {rows.line_num}, {len(header)} in the header"
                raise ValueError(f"{path}: {found}; put a text that holds a comma in quotes")
