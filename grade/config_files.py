"""Settings from YAML files and ``key=value`` overrides.

The YAML reader is DVC's own, ruamel.yaml (YAML 1.2), so a file means the same to both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from grade.config import Config
from grade.errors import InputError

Kind = TypeVar("Kind", bound=Config)


def load_config(
    kind: type[Kind], paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = ""
) -> Kind:
    """Build a config from YAML files (later over earlier), then ``key=value`` overrides.

    Nested mappings are merged; ``a.b=1`` sets field ``b`` of the nested config ``a``. A file that has the key
    ``section`` holds the fields below it, beside what is no field of the config.
    """
    paths, overrides = list(paths), list(overrides)
    return kind.parse(read_values(paths, overrides, section), *origin(paths, overrides))


def read_values(paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = "") -> dict[str, Any]:
    """The values that `load_config` reads, before validation."""
    values: dict[str, Any] = {}
    for path in paths:
        content = read_yaml(path)
        inner = content.get(section) if section else None
        _merge(values, inner if isinstance(inner, dict) else content)
    for override in overrides:
        key, value = parse_assignment(override, "key=value, for example --set tau=1.0")
        for part in reversed(key.split(".")):
            value = {part: value}
        _merge(values, value)
    return values


def origin(paths: Iterable[str | Path], overrides: Iterable[str]) -> tuple[str, list[str]]:
    """Where such values come from, as `Config.parse` takes it: the files' names, and the keys of the overrides."""
    return " + ".join(Path(path).name for path in paths), [text.partition("=")[0].strip() for text in overrides]


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, over the file that its key ``over`` names, if it has one.

    Nested mappings are merged; an empty file is an empty mapping.
    """
    try:
        content = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError("config file", str(path), f"a YAML file in UTF-8 ({error})") from None
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise InputError(Path(path).name, content, "a mapping of field names to values")
    if "over" not in content:
        return content
    values = read_yaml(Path(path).parent / str(content.pop("over")))
    _merge(values, content)
    return values


def parse_yaml(text: str) -> Any:
    """Read YAML 1.2, as DVC does; a `ValueError` says what is wrong, and in which line.

    >>> parse_yaml("{a: [1, 2e-3], b: true, c: 1:30}")
    {'a': [1, 0.002], 'b': True, 'c': '1:30'}
    """
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:  # without its excerpts of the text
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{error.problem or error.context}, line {mark.line + 1}" if mark else str(error)) from None


def parse_assignment(text: str, example: str) -> tuple[str, Any]:
    """Name and value of the option ``--set NAME=VALUE``; ``example`` shows one in an error."""
    name, sign, raw = text.partition("=")
    if not sign or not all(part.strip() for part in name.split(".")):
        raise InputError("--set", text, example)
    try:
        return name.strip(), parse_yaml(raw)
    except ValueError as error:
        raise InputError("--set", text, f"a value that is valid YAML ({error})") from None


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value
