"""Typed configs read from YAML: an unknown key, a wrong type or a bad value is one clear error.

Every component owns its config class (a `Config` with a description on each field) beside the code it configures.
Where a dataclass is needed, because a library's own is extended, `Settings` gives it the same strictness.
This module only reads: YAML files in order, later ones over earlier ones, then ``key=value`` overrides.

Types are strict, because YAML is not: ``1e-5`` is a *string* to PyYAML and a float to DVC, so it is refused here with
the advice to write ``1.0e-5``, and both read the same.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self, get_type_hints

import pydantic
import yaml

from grade.errors import InputError, require_file

MOST_KEYS = 60
"""Keys that an error lists."""
SEEDS = 2**32
"""Seeds are below this: numpy takes no larger ones, and torch's generator on CPUs reads only their lower 32 bits."""
MOST_VALUES = 100_000
"""Values of a YAML text with its aliases written out: a few lines of aliases of aliases can stand for billions."""


class Config(pydantic.BaseModel):
    """Base of all configs: immutable, strict types, no unknown keys, no NaN or infinity."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "", sources: Mapping[str, str] | None = None) -> Self:
        """Build a config from a mapping.

        Args:
            values: Field names and values.
            source: Where they come from (a file name), put before the field in an error.
            sources: Fields that come from elsewhere, as ``a.b``, and from where.

        Returns:
            The validated config.

        Raises:
            InputError: Naming the first wrong field, its value and what is allowed.
        """
        try:
            return cls.model_validate(dict(values))
        except pydantic.ValidationError as error:
            first = _as_input_error(cls, error)
            source = _source_of(first.field, sources or {}, f"{source}:" if source else "")
            raise InputError(f"{source} {first.field}".strip(), first.value, first.allowed) from None

    @classmethod
    def load(
        cls, paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), options: Iterable[str] = (),
        section: str = "",
    ) -> Self:  # fmt: skip
        """Build a config from YAML files (later over earlier), then ``key=value`` overrides, then options.

        Args:
            paths: YAML files, each a mapping of field names; nested mappings are merged.
            overrides: Strings ``key=value``; ``a.b=1`` sets field ``b`` of the nested config ``a``. An error in one
                names ``--set``.
            options: The same, from options of the command line that have a name of their own.
            section: A file that has this key holds the fields below it, beside what is no field of this config.

        Returns:
            The validated config.

        Raises:
            InputError: For a missing or unreadable file, a malformed override or a wrong field.
        """
        return _load(cls, paths, overrides, options, section)


def setting(default: Any, text: str) -> Any:
    """A dataclass field with its description, where ``HfArgumentParser`` also looks for it."""
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata={"help": text})
    return dataclasses.field(default=default, metadata={"help": text})


class Settings:
    """Mixin that makes a dataclass as strict as a `Config`. Types and limits come from its annotations."""

    @classmethod
    @functools.cache
    def schema(cls) -> type[Config]:
        """A `Config` with the same fields, defaults and descriptions."""
        hints = get_type_hints(cls, include_extras=True)
        columns = {
            field.name: (hints[field.name], pydantic.Field(cls.default_of(field.name), description=_help(field)))
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
        """Check the present values of some fields.

        Args:
            names: The fields' names.

        Raises:
            InputError: For the first wrong value.
        """
        self.schema().parse({name: getattr(self, name) for name in names})

    @classmethod
    def parse(cls, values: Mapping[str, Any], source: str = "", sources: Mapping[str, str] | None = None) -> Self:
        """Build the dataclass from a mapping; arguments and errors as `Config.parse`."""
        checked = cls.schema().parse(values, source, sources)
        try:
            return cls(**{name: getattr(checked, name) for name in values})
        except InputError as error:
            place = _source_of(error.field, sources or {}, f"{source}:" if source else "")
            raise InputError(f"{place} {error.field}".strip(), error.value, error.allowed) from None
        except (ValueError, TypeError, ImportError) as error:  # what the library's own class refuses
            reason = str(error).strip().splitlines()[0]
            raise InputError(source or cls.__name__, dict(values), f"values that fit together ({reason})") from None

    @classmethod
    def load(
        cls, paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), options: Iterable[str] = (),
        section: str = "",
    ) -> Self:  # fmt: skip
        """Build the dataclass from files and overrides; arguments and errors as `Config.load`."""
        return _load(cls, paths, overrides, options, section)


def own_fields(cls: type[Settings]) -> set[str]:
    """Fields that a class of ours declares, not the library's class that it extends."""
    ours = [base for base in cls.__mro__ if issubclass(base, Settings)]
    return {name for base in ours for name in vars(base).get("__annotations__", {})}


class _AnyType(Config):
    # A library's dataclass has fields of its own types, and names such as model_init_kwargs.
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def _help(field: dataclasses.Field) -> str:
    return field.metadata.get("help", "")


def _load(
    cls: type[Config] | type[Settings], paths: Iterable[str | Path], overrides: Iterable[str], options: Iterable[str],
    section: str,
) -> Any:  # fmt: skip
    paths, overrides, options = list(paths), list(overrides), list(options)
    values = read_values(paths, [*overrides, *options], section)
    sources = {_key(text): "--set" for text in overrides} | {_key(text): "" for text in options}
    return cls.parse(values, " + ".join(Path(p).name for p in paths), sources)


def read_values(
    paths: Iterable[str | Path] = (), overrides: Iterable[str] = (), section: str = ""
) -> dict[str, Any]:  # fmt: skip
    """The values that `Config.load` reads, before validation.

    Args:
        paths: YAML files, later over earlier.
        overrides: Strings ``key=value``.
        section: As in `Config.load`.

    Returns:
        Field names and values.

    Raises:
        InputError: For a missing or unreadable file or a malformed override.
    """
    values: dict[str, Any] = {}
    for path in paths:
        content = read_yaml(path)
        inner = content.get(section) if section else None
        _merge(values, inner if isinstance(inner, dict) else content)
    for override in overrides:
        _merge(values, _parse_override(override))
    return values


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, over the file that its key ``over`` names, if it has one.

    Args:
        path: The file.

    Returns:
        Its content over that of the other file; nested mappings are merged, an empty file is an empty mapping.

    Raises:
        InputError: If a file is missing, is not YAML, or holds anything but a mapping.
    """
    content = _read_one(path)
    if "over" not in content:
        return content
    values = read_yaml(Path(path).parent / str(content.pop("over")))
    _merge(values, content)
    return values


def _read_one(path: str | Path) -> dict[str, Any]:
    try:
        content = parse_yaml(require_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError("config file", str(path), f"a readable YAML file ({error.strerror})") from None
    except UnicodeDecodeError:
        raise InputError("config file", str(path), "a readable YAML file, in UTF-8") from None
    except yaml.YAMLError as error:
        raise InputError("config file", str(path), f"valid YAML ({problem_of(error)})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(Path(path).name, content, "a mapping of field names to values")
    return content


def parse_yaml(text: str) -> Any:
    """Read YAML that has one meaning.

    Args:
        text: A document of plain values.

    Returns:
        Its content.

    Raises:
        yaml.YAMLError: If it is not YAML, or is read differently by different readers or not at all: a key that is
            given twice, ``1:30`` (90 in YAML 1.1, text in 1.2), an impossible date, a number of thousands of digits,
            text that UTF-8 cannot store or no path can hold, more than `MOST_VALUES` values, nesting without end.

    >>> parse_yaml("{a: [1, 2.0e-3], b: yes}")
    {'a': [1, 0.002], 'b': True}
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # of the constructors of dates and numbers
        raise yaml.YAMLError(str(error)) from None


def problem_of(error: yaml.YAMLError) -> str:
    """A YAML error without its excerpts of the text."""
    mark = getattr(error, "problem_mark", None)
    place = f", line {mark.line + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or error}{place}"


def _count_values(node: yaml.Node, counts: dict[int, int | None]) -> int:
    """Values below a node, itself included; each node is visited once, however often it is named."""
    if id(node) in counts:
        if counts[id(node)] is None:
            raise yaml.MarkedYAMLError(problem="a value that contains itself", problem_mark=node.start_mark)
        return counts[id(node)]
    counts[id(node)] = None
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
        below = 0
    elif isinstance(node, yaml.MappingNode):
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
                keys.add((key.tag, key.value))
        below = sum(_count_values(part, counts) for pair in node.value for part in pair)
    else:
        below = sum(_count_values(part, counts) for part in node.value)
    if below > MOST_VALUES:
        raise yaml.MarkedYAMLError(problem=f"more than {MOST_VALUES:,} values", problem_mark=node.start_mark)
    counts[id(node)] = 1 + below
    return 1 + below


def _check_scalar(node: yaml.ScalarNode) -> None:
    problem = ""
    if node.tag.endswith((":int", ":float")) and ":" in node.value:
        problem = f"{node.value} is a number to some readers and text to others: quote it, or write the number"
    elif re.search("[\0\ud800-\udfff]", node.value):
        problem = "text with a null character or half of a surrogate pair"
    if problem:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _parse_override(text: str) -> dict[str, Any]:
    key, sign, raw = text.partition("=")
    if not sign or not key.strip():
        raise InputError("--set", text, "key=value, for example --set tau_start=1.0")
    try:
        value = parse_yaml(raw)
    except yaml.YAMLError as error:
        raise InputError("--set", text, f"a value that is valid YAML ({problem_of(error)})") from None
    if isinstance(value, str):
        # YAML 1.1 reads 1e-5 as a string. A file must mean the same to DVC, but only this code reads the command line,
        # so here it can be accepted as a number.
        try:
            value = float(value)
        except ValueError:
            pass
    for part in reversed(_key(text).split(".")):
        value = {part: value}
    return value


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _source_of(field: str, sources: Mapping[str, str], default: str) -> str:
    """Where a field's value comes from: the last override of it, of a part of it or of what it is a part of."""
    for key, source in reversed(sources.items()):
        if f"{field}.".startswith(f"{key}.") or f"{key}.".startswith(f"{field}."):
            return source
    return default


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _as_input_error(cls: type[Config], error: pydantic.ValidationError) -> InputError:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InputError):  # raised by a cross-field check of our own: already says everything
        return cause
    location = [str(part) for part in first["loc"]]
    field = ".".join(location)
    if first["type"] == "extra_forbidden":
        known = _fields_at(cls, location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        listed = f"one of {', '.join(sorted(known))}" if len(known) <= MOST_KEYS else "a known key; --help lists them"
        allowed = f"a known key (did you mean {close[0]!r}?)" if close else listed
    elif first["type"] == "missing":
        allowed = "a value; this key is required"
    elif first["type"] in ("float_type", "int_type") and isinstance(first["input"], str):
        allowed = "a number (YAML reads 1e-5 as text: write 1.0e-5)"
    elif first["type"] == "literal_error":
        allowed = allowed_names(first["input"], re.findall(r"'([^']*)'", first["ctx"]["expected"]))
    else:
        allowed = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    value = "nothing" if first["type"] == "missing" else first["input"]
    if first["type"] == "extra_forbidden":
        value = location[-1]
    return InputError(field, value, allowed)


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
