"""The one error that bad input raises.

Bad input at the boundary (a setting, a row of data, a model that would be trained wrongly, a reward that returns no
numbers) raises `InputError`: one sentence with the field, its value and what is allowed. The command line prints that
line, or what a library says of a file or a value, and exits with code 2. Everything else raises an ordinary exception.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Input that cannot be used: ``<field>: got <value>; allowed: <what is allowed>``.

    Args:
        field: The wrong input as the user knows it: a config key, a file, an option.
        value: The given value. Long values are shortened in the message.
        allowed: What would be accepted, and how to get there.

    >>> raise InputError("tau", -1.0, "a number greater than 0")
    Traceback (most recent call last):
    grade.errors.InputError: tau: got -1.0; allowed: a number greater than 0
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        super().__init__(" ".join(f"{field}: got {shown}; allowed: {allowed}".split()))
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:  # from a worker process
        return type(self), (self.field, self.value, self.allowed)


MOST_SHOWN = 500
"""Characters of a library's message."""


def require_file(path: str | Path) -> Path:
    """A path to a file; a folder, or nothing, is an `OSError`."""
    os.stat(path)
    return Path(path)


def file_error(error: BaseException) -> str:
    """The file, where the exception names it, and the reason, on one line.

    >>> file_error(FileNotFoundError(2, "No such file or directory", "a.json"))
    'a.json: No such file or directory'
    """
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    else:
        reason = f"{type(error).__name__}: {error}"
    line = " ".join(reason.split())
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}..."




@contextmanager
def reading(field: str, place: str | Path, allowed: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn what a library raises for bad content into one line that names field, file and reason."""
    try:
        yield
    except InputError:
        raise
    except (kind, OSError) as error:
        raise InputError(field, str(place), f"{allowed} ({file_error(error)})") from error
