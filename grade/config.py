"""Settings: pydantic models.

Every component owns its config class (a `Config` with a description on each field) beside the code it configures. An
unknown key, a wrong type or a bad value is one `InputError` that names the field, the value and what is allowed.
`grade.config_files` reads them from files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args, get_origin

import pydantic

from grade.errors import InputError

MOST_KEYS = 60
"""Number of known keys up to which an error lists them all."""
SEEDS = 2**32
"""Seeds are below this: numpy takes no larger ones, and torch's CPU generator reads only their lower 32 bits."""
Text = Annotated[str, pydantic.BeforeValidator(lambda value: "" if value is None else value)]
"""Text that may be empty, which YAML reads as null: ``--gold ""``."""
RewardScope = Literal["prompt_and_completion", "completion"]
"""The text that a reward reads, where it is not a function."""


class _Called(type(pydantic.BaseModel)):
    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Build the config class that the values ask for; what pydantic finds wrong becomes an `InputError`."""
        kind = cls.kind(values)
        try:
            return super(_Called, kind).__call__(*args, **values)
        except pydantic.ValidationError as error:
            raise _as_input_error(kind, error) from None


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


def _as_input_error(cls: type[Config], error: pydantic.ValidationError) -> InputError:
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
