"""The one error that bad input raises.

Bad input (a config value, a file, a model that cannot be supported, a reward that is not finite) raises `InputError`.
Its message is one line that names the field, the value and what is allowed; the command line prints that line and
exits with code 2. What a library raises for a file that is missing, damaged or of another kind (`FILE_ERRORS`) becomes
such a line in one place: at the command line, which names the file, or in `reading`, which names the field as well. So
code that reads files catches nothing itself. Mistakes of the calling code, such as tensors whose shapes do not fit,
raise ordinary exceptions with a traceback.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
        shown = object.__repr__(value)
        with suppress(Exception):  # what a reward returned
            shown = repr(value)
        if len(shown) > 120:
            shown = shown[:117] + "..."
        line = " ".join(f"{field}: got {shown}; allowed: {allowed}".split())
        super().__init__("".join(c if c.isprintable() else "?" for c in line))  # a terminal obeys the others
        self.field, self.value, self.allowed = field, value, allowed

    def __reduce__(self) -> tuple[type, tuple[str, object, str]]:  # from a worker process
        return type(self), (self.field, self.value, self.allowed)


def require_file(path: str | Path) -> Path:
    """A path that can be read to its end: called before a file is opened, because opening a FIFO waits for a writer.

    A pipe without a name (``/dev/stdin``, the shell's ``<(...)``) has a writer, and may be read. All else that is no
    file is an `OSError` with the path and the reason.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    unnamed = stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path))
    if not stat.S_ISREG(mode) and not unnamed and not os.path.samefile(path, os.devnull):
        raise OSError(errno.EINVAL, "it is a FIFO, a socket or a device, not a file", str(path))
    return Path(path)


MOST_SHOWN = 500
"""Characters of a library's message."""
FILE_ERRORS = (
    "builtins.OSError",  # the file system, subprocesses, and transformers for a model that it cannot find
    "builtins.UnicodeError",  # text that is not in UTF-8, or that UTF-8 cannot store
    "builtins.EOFError",  # a file that ends too early: pickle, zipfile, numpy
    "builtins.RecursionError",  # JSON that is nested too deeply
    "json.decoder.JSONDecodeError",  # json
    "ruamel.yaml.error.YAMLError",  # ruamel.yaml
    "yaml.error.YAMLError",  # yaml, in datasets and transformers
    "zipfile.BadZipFile",  # zipfile, numpy's .npz files
    "zlib.error",  # a damaged archive
    "struct.error",  # a GGUF file that ends too early
    "_lzma.LZMAError",  # a damaged archive
    "_pickle.UnpicklingError",  # torch.load, which refuses code
    "safetensors._safetensors_rust.SafetensorError",  # weights: a damaged file, or a tensor that is missing
    "pyarrow.lib.ArrowException",  # parquet files and datasets
    "pandas.errors.ParserError",  # tables in .csv files
    "pandas.errors.EmptyDataError",  # tables in .csv files
    "nbformat.reader.NotJSONError",  # notebooks
    "jsonschema.exceptions.ValidationError",  # notebooks whose parts have the wrong types
    "datasets.exceptions.DatasetsError",  # datasets of the hub, and folders that save_to_disk wrote
    "huggingface_hub.errors.HfHubHTTPError",  # the hub's answer
    "huggingface_hub.errors.HFValidationError",  # a name that can be no id of the hub
    "dvc.exceptions.DvcException",  # dvc.yaml, and DVC's own files
)
"""What libraries raise for a file that is missing, damaged or of another kind, by full name, and beside it where from.

By name, because importing a library only to name its exceptions takes seconds."""


def is_file_error(error: BaseException) -> bool:
    """Whether an exception is one of `FILE_ERRORS`, derived from one, or what Rust and torch say of the system."""
    known = any(f"{kind.__module__}.{kind.__qualname__}" in FILE_ERRORS for kind in type(error).__mro__)
    return known or bool(re.search(r"\(os error \d+\)|PytorchStreamWriter|inline_container|iostream error", str(error)))


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


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception is a lack of memory: Python's, torch's on a GPU, torch's on a CPU (a `RuntimeError`)."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "DefaultCPUAllocator" in str(error)


@contextmanager
def reading(field: str, place: str | Path, allowed: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn whatever a library raises for bad content into one line that names field, file and reason.

    For a block that reads and parses a single input, or runs code of others on it, and computes nothing else: there any
    exception means bad content. With a narrower ``kind`` only those and `FILE_ERRORS` do. A lack of memory stays what
    it is.

    >>> with reading("reward", "r.json", "a reward's settings"):
    ...     {}["kind"]
    Traceback (most recent call last):
    grade.errors.InputError: reward: got 'r.json'; allowed: a reward's settings (KeyError: 'kind')
    """
    try:
        yield
    except Exception as error:
        known = is_file_error(error) or isinstance(error, kind)
        if isinstance(error, InputError) or is_memory_error(error) or not known:
            raise
        raise InputError(field, str(place), f"{allowed} ({file_error(error)})") from error
