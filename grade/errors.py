"""The one error that bad input raises.

Bad input (a config value, a file, a model that cannot be supported, a reward that is not finite) raises `InputError`.
Its message is one line that names the field, the value and what is allowed; the command line prints that line and
exits with code 2. Mistakes of the calling code, such as tensors whose shapes do not fit, raise ordinary exceptions
with a traceback.
"""

import errno
import os
import stat
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


def require_file(path: str | Path) -> Path:
    """A path that can be read to its end: called before a file is opened, because opening a FIFO waits for a writer.

    A pipe without a name (``/dev/stdin``, the shell's ``<(...)``) has a writer, and may be read.

    Args:
        path: Of a file that is to be read.

    Returns:
        The path.

    Raises:
        OSError: If there is nothing, or something else than a file: a folder, a named FIFO, a socket, a device. It has
            the path and, as ``strerror``, the reason.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    unnamed = stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path))
    if not stat.S_ISREG(mode) and not unnamed and not os.path.samefile(path, os.devnull):
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device, not a file", str(path))
    return Path(path)
