"""Settings: pydantic models read from YAML files and ``key=value`` overrides.

Every component owns its config class (a `Config` with a description on each field) beside the code it configures. An
unknown key, a wrong type or a bad value is one `InputError` that names the field, the value and what is allowed.
The YAML reader is DVC's own, ruamel.yaml (YAML 1.2), so a file means the same to both.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import pydantic
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from grade.errors import InputError

MOST_KEYS = 60
"""Number of known keys up to which an error lists them all."""
SEEDS = 2**32
"""Seeds are below this: numpy takes no larger ones, and torch's CPU generator reads only their lower 32 bits."""
Text = Annotated[str, pydantic.BeforeValidator(lambda value: "" if value is None else value)]
"""Text that may be empty, which YAML reads as null: ``--gold ""``."""


class _Called(type(pydantic.BaseModel)):
    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Build the config class that the values ask for; what pydantic finds wrong becomes an `InputError`."""
        kind = cls.kind(values)
        try:
            return super(_Called, kind).__call__(*args, **values)
        except pydantic.ValidationError as error:
            raise as_input_error(kind, error) from None


class Config(pydantic.BaseModel, metaclass=_Called):
    """Base of all configs: immutable, strict types, no unknown keys, no NaN or infinity."""

    model_config = pydantic.ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> type[Config]:
        """The class to build from these values: this one, unless a subclass chooses another."""
        return cls

    @classmethod
    def described(cls, prefix: str = "") -> Iterator[tuple[str, str]]:
        """Each key with default and meaning, as help lists them; those of nested configs are ``a.b``."""
        for name, field in cls.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                yield from field.annotation.described(f"{prefix}{name}.")
                continue
            default = "required" if field.is_required() else field.get_default(call_default_factory=True)
            shown = default if isinstance(default, str) and default else repr(default)
            if get_origin(field.annotation) is Literal:
                shown = f"{'|'.join(get_args(field.annotation))}; {shown}"
            yield f"{prefix}{name}", f"({shown}): {field.description}"

    @classmethod
    def known_keys(cls) -> list[str]:
        """Keys that an error may suggest."""
        return list(cls.model_fields)

    @classmethod
    def explain_unknown(cls, name: str) -> str:
        """What an error about the unknown key ``name`` says is allowed."""
        known = cls.known_keys()
        if close := difflib.get_close_matches(name, known, n=1):
            return f"a known key (did you mean {close[0]!r}?)"
        return f"one of {', '.join(sorted(known))}" if len(known) <= MOST_KEYS else "a known key; --help lists them"

    @classmethod
    def load(cls, paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = "") -> Self:
        """Build a config from YAML files (later over earlier), then ``key=value`` overrides.

        Nested mappings are merged; ``a.b=1`` sets field ``b`` of the nested config ``a``. A file that has the key
        ``section`` holds the fields below it, beside what is no field of this config.
        """
        paths, overrides = list(paths), list(overrides)
        return cls.parse(read_values(paths, overrides, section), *origin(paths, overrides))

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "", given: Sequence[str] = ()) -> Self:
        """Build a config from a mapping; `InputError` names the first wrong field, its value and what is allowed.

        ``source`` is where the values come from (a file name), put before the field in an error, except for the fields
        that were ``given`` as ``a.b`` on the command line.
        """
        try:
            return cls(**values)
        except InputError as error:
            field = f"{error.field}."
            if not source or any(field.startswith(f"{key}.") or f"{key}.".startswith(field) for key in given):
                raise
            raise InputError(f"{source}: {error.field}", error.value, error.allowed) from None


def read_values(paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = "") -> dict[str, Any]:
    """The values that `Config.load` reads, before validation."""
    values: dict[str, Any] = {}
    for path in paths:
        content = read_yaml(path)
        inner = content.get(section) if section else None
        _merge(values, inner if isinstance(inner, dict) else content)
    for override in overrides:
        key, value = parse_assignment(override, "key=value, for example --set tau_start=1.0")
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


def as_input_error(cls: type[Config], error: pydantic.ValidationError) -> InputError:
    """The first of what pydantic found wrong with the values of a config."""
    errors = error.errors(include_url=False)
    kinds = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]  # one for each type of a union
    first = max(kinds, key=lambda one: len(one["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # a check of several fields, which says everything already
        return cause
    location, value = [str(part) for part in first["loc"]], first["input"]
    if first["type"] == "extra_forbidden":
        allowed, value = _config_at(cls, location[:-1]).explain_unknown(location[-1]), location[-1]
    elif first["type"] == "missing":
        allowed, value = "a value; this key is required", "nothing"
    elif first["type"] == "literal_error":
        allowed = allowed_names(value, re.findall(r"'([^']*)'", first["ctx"]["expected"]))
    else:
        allowed = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if len(kinds) > 1:  # pydantic adds the union's type to the location
        location = [part for part in location if not re.fullmatch(r"str|int|float|[\w-]+\[.*\]", part)]
    return InputError(".".join(location), value, allowed)


def _config_at(cls: type[Config], location: list[str]) -> type[Config]:
    for part in location:
        field = cls.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, Config)):
            return cls
        cls = inner
    return cls


def allowed_names(value: object, names: Iterable[str]) -> str:
    """The names as an error lists them, with the one that was probably meant.

    >>> allowed_names("stee", ["gumbel", "ste"])
    "'gumbel' or 'ste' (did you mean 'ste'?)"
    """
    names = list(names)
    *others, last = map(repr, names)
    close = difflib.get_close_matches(str(value), names, n=1)
    listed = f"{', '.join(others)} or {last}" if others else last
    return listed + (f" (did you mean {close[0]!r}?)" if close else "")
