"""Typed configs read from YAML: an unknown key, a wrong type or a bad value is one clear error.

Every component owns its config class (a `Config` with a description on each field) beside the code it configures.
Where a dataclass is needed, because a library's own is extended, `Settings` gives it the same strictness.
This module only reads: YAML files in order, later ones over earlier ones, then ``key=value`` overrides. The reader is
DVC's own, ruamel.yaml (YAML 1.2), so a file means the same to both. pydantic-settings does not fit: its errors and its
sources are its own, and what is here would stay.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

import pydantic
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from grade.errors import InputError, reading, require_file

MOST_KEYS = 60
"""Keys that an error lists."""
MOST_VALUES = 10**6
"""Characters of a YAML file, and its values: a few lines of aliases can stand for billions."""
SEEDS = 2**32
"""Seeds are below this: numpy takes no larger ones, and torch's generator on CPUs reads only their lower 32 bits."""

LARGEST = 1e18
"""Largest number of a setting: its square is still a float32, and it is still a whole number of 64 bits."""
MOST_BYTES = 10**12
"""More than any machine has for what is estimated from below."""
Text = Annotated[str, pydantic.BeforeValidator(lambda value: "" if value is None else value)]
"""Text that may be empty, which YAML reads as null: ``--gold ""``."""


def check_bytes(sizes: Mapping[str, int], each: int, most: int | None = None) -> None:
    """Refuse the largest of sizes (of a batch, of a model) if their product needs more than a machine has.

    ``most``: the machine's bytes beside the weights; none: `MOST_BYTES`.
    """
    need, name = math.prod(sizes.values()) * each, max(sizes, key=sizes.__getitem__)
    if need > (most or MOST_BYTES):
        others = ", ".join(f"{key} = {value}" for key, value in sizes.items() if key != name)
        limit = f"; this machine has {_bytes(most)} beside the weights" if most else ""
        raise InputError(name, sizes[name], f"less: it would need {_bytes(need)} with {others}{limit}")


def _bytes(count: int) -> str:
    return f"{count / 1e12:,.3g} TB" if count >= 1e12 else f"{count / 1e9:,.3g} GB"


class _Loading:
    """What `Config` and `Settings` share: reading files and overrides before `parse`."""

    @classmethod
    def load(cls, paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = "") -> Self:
        """Build a config from YAML files (later over earlier), then ``key=value`` overrides.

        Nested mappings are merged; ``a.b=1`` sets field ``b`` of the nested config ``a``. A file that has the key
        ``section`` holds the fields below it, beside what is no field of this config.
        """
        paths, overrides = list(paths), list(overrides)
        return cls.parse(read_values(paths, overrides, section), *origin(paths, overrides))


class _Called(type(pydantic.BaseModel)):
    def __call__(cls, *args: Any, **values: Any) -> Any:
        """A config; of what pydantic finds wrong an `InputError`, as from `Config.parse`."""
        try:
            return super().__call__(*args, **values)
        except pydantic.ValidationError as error:
            raise as_input_error(cls, error) from None


class Config(_Loading, pydantic.BaseModel, metaclass=_Called):
    """Base of all configs: immutable, strict types, no unknown keys, no NaN or infinity."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @pydantic.field_validator("*")
    @classmethod
    def _usable(cls, value: Any) -> Any:
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, int | float) and abs(part) > LARGEST:
                raise ValueError(f"at most {LARGEST:g} in size: arithmetic with larger numbers overflows")
            if isinstance(part, str) and "\0" in part:
                raise ValueError("text without the character NUL")
        return value

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "", given: Sequence[str] = ()) -> Self:
        """Build a config from a mapping; `InputError` names the first wrong field, its value and what is allowed.

        ``source`` is where the values come from (a file name), put before the field in an error, but for the fields
        that were ``given`` as ``a.b`` on the command line.
        """
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            raise _placed(as_input_error(cls, error), source, given) from None


def setting(default: Any, text: str) -> Any:
    """A dataclass field with its description, where ``HfArgumentParser`` also looks for it."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


class Settings(_Loading):
    """Mixin that makes a dataclass as strict as a `Config`. Types and limits come from its annotations."""

    @classmethod
    @functools.cache
    def schema(cls) -> type[Config]:
        """A `Config` with the same fields, defaults and descriptions."""
        hints = get_type_hints(cls, include_extras=True)
        columns = {
            field.name: (
                hints[field.name],
                pydantic.Field(cls.default_of(field.name), description=field.metadata.get("help", "")),
            )
            for field in dataclasses.fields(cls)
            if field.init
        }
        return pydantic.create_model(cls.__name__, __base__=_AnyType, **columns)

    @classmethod
    def default_of(cls, name: str) -> Any:
        """A field's default."""
        field = cls.__dataclass_fields__[name]
        return field.default_factory() if field.default is dataclasses.MISSING else field.default

    def check_values(self, names: Iterable[str]) -> None:
        """Raise `InputError` for the first of these fields whose present value is wrong; the others become plain."""
        given = {name: getattr(self, name) for name in names}
        checked = self.schema().parse(given)
        for name, value in given.items():
            if isinstance(getattr(checked, name), float | str) and not isinstance(value, int | float | str):
                setattr(self, name, getattr(checked, name))  # of a number of numpy, a Decimal, a Fraction, None

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "", given: Sequence[str] = ()) -> Self:
        """Build the dataclass from a mapping; arguments and errors as `Config.parse`."""
        checked = cls.schema().parse(values, source, given)
        try:
            return cls(**{name: getattr(checked, name) for name in values})
        except InputError as error:
            raise _placed(error, source, given) from None


def own_fields(cls: type[Settings]) -> set[str]:
    """Fields that a class of ours declares, not the library's class that it extends."""
    ours = [base for base in cls.__mro__ if issubclass(base, Settings)]
    return {name for base in ours for name in vars(base).get("__annotations__", {})}


class _AnyType(Config):
    # A library's dataclass has fields of its own types, and names such as model_init_kwargs.
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def read_values(paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = "") -> dict[str, Any]:
    """The values that `load` reads, before validation."""
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
    """Where such values come from, as `Config.parse` takes it: the files' names, and the keys that were given."""
    return " + ".join(Path(path).name for path in paths), [text.partition("=")[0].strip() for text in overrides]


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, over the file that its key ``over`` names, if it has one.

    Nested mappings are merged; an empty file is an empty mapping. `InputError` says what is wrong with a file.
    """
    with reading("config file", path, "a readable YAML file"):
        content = parse_yaml(require_file(path).read_text(encoding="utf-8"))
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
    if len(text) > MOST_VALUES:  # the reader takes a minute for a few million
        raise ValueError(f"more than {MOST_VALUES} characters")
    try:
        content = YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:  # without its excerpts of the text
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{error.problem or error.context}, line {mark.line + 1}" if mark else str(error)) from None
    left, values = MOST_VALUES, [content]
    while values:
        value, left = values.pop(), left - 1
        values += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if left < 0:
            raise ValueError(f"more than {MOST_VALUES} values, counted where aliases repeat them")
    return content


def parse_assignment(text: str, example: str) -> tuple[str, Any]:
    """Name and value of the option ``--set NAME=VALUE``; ``example`` shows one in an error."""
    name, sign, raw = text.partition("=")
    if not sign or not all(part.strip() for part in name.split(".")):
        raise InputError("--set", text, example)
    with reading("--set", text, "a value that is valid YAML"):
        return name.strip(), parse_yaml(raw)


def _placed(error: InputError, source: str, given: Sequence[str]) -> InputError:
    """An error with the file of the field's value, unless it, a part of it or what it is part of was given."""
    field = f"{error.field}."
    if not source or any(field.startswith(f"{key}.") or f"{key}.".startswith(field) for key in given):
        return error
    return InputError(f"{source}: {error.field}", error.value, error.allowed)


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def as_input_error(cls: type[Config], error: pydantic.ValidationError) -> InputError:
    """The first of what pydantic found wrong with the values of a config."""
    errors = error.errors(include_url=False)
    kinds = [one for one in errors if one["loc"][:1] == errors[0]["loc"][:1]]  # text or a list of texts: one for each
    first = max(kinds, key=lambda one: len(one["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # raised by a cross-field check of our own: already says everything
        return cause
    location, value = [str(part) for part in first["loc"]], first["input"]
    if len(kinds) > 1 and first["type"] != "extra_forbidden":
        location = [part for part in location if not re.fullmatch(r"str|int|float|[\w-]+\[.*\]", part)]
    if first["type"] == "extra_forbidden":
        known, value = _fields_at(cls, location[:-1]), location[-1]
        close = difflib.get_close_matches(value, known, n=1)
        listed = f"one of {', '.join(sorted(known))}" if len(known) <= MOST_KEYS else "a known key; --help lists them"
        allowed = f"a known key (did you mean {close[0]!r}?)" if close else listed
    elif first["type"] == "missing":
        allowed, value = "a value; this key is required", "nothing"
    elif first["type"] == "literal_error":
        allowed = allowed_names(value, re.findall(r"'([^']*)'", first["ctx"]["expected"]))
    else:
        allowed = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return InputError(".".join(location), value, allowed)


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


def _fields_at(cls: type[pydantic.BaseModel], location: list[str]) -> list[str]:
    for part in location:
        field = cls.model_fields.get(part)
        inner = field.annotation if field else None
        if not (isinstance(inner, type) and issubclass(inner, pydantic.BaseModel)):
            return list(cls.model_fields)
        cls = inner
    return list(cls.model_fields)
