"""What commands share: options, help that is written from a config's own fields, metrics on the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from grade.config import Config, Settings, own_fields

ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {}
"""By command, what adds its options and the function that executes them."""
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An option, as for ``ArgumentParser.add_argument``."""
    return names, settings


def values(files: str = "--config", example: str = "KEY=VALUE") -> list[Option]:
    """The option for YAML files, and ``--set``, which goes over them."""
    return [
        option(files, action="append", default=[], metavar="FILE",
               help="YAML file; may be given several times, later ones over earlier ones"),
        option("--set", action="append", default=[], metavar=example,
               help="one value over the files', for example --set seed=3"),
    ]  # fmt: skip


def command(
    name: str, *options: Option, config: type[Config] | type[Settings] | None = None, others: str = "", **paths: str
) -> Callable[[Callable], Callable]:
    """Decorate the function that executes a command, from its options.

    ``paths`` are required options for folders, or a file (``metrics``), with their meanings. With a config there are
    ``--config`` and ``--set`` as well, and every key is listed below the options with its default and meaning.
    """

    def registered(execute: Callable) -> Callable:
        def add(parser: argparse.ArgumentParser) -> None:
            required = [option(f"--{key.replace('_', '-')}", required=True, help=text,
                               metavar="FILE" if key == "metrics" else "DIR")
                        for key, text in paths.items()]  # fmt: skip
            for names, settings in (*options, *required, *(values() if config else ())):
                parser.add_argument(*names, **settings)
            if config:
                lines = _describe(config) + ([f"  ... {others}"] if others else [])
                parser.epilog = "config keys (--set KEY=VALUE, or --KEY VALUE; default): meaning\n" + "\n".join(lines)
                parser.set_defaults(keys=frozenset(_fields(config)))
            parser.set_defaults(execute=execute)

        ADD[name] = add
        return execute

    return registered


def spelt(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments, with ``--output_dir``, as other libraries write it, for ``--output-dir``."""
    words = []
    for word in argv:
        name, equals, value = word.partition("=")
        dashed = name.replace("_", "-")
        words.append(dashed + equals + value if dashed in parser._option_string_actions else word)
    return words


def take_keys(args: argparse.Namespace, unknown: Sequence[str]) -> list[str]:
    """Take ``--key value`` of the command's config, with ``_`` or ``-``, as ``--set key=value``; what is left."""
    left, rest = [], list(unknown)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if not word.startswith("--") or key.partition(".")[0] not in getattr(args, "keys", ()):
            left.append(word)
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        args.set.append(f"{key}={value}")
    return left


def _fields(config: type[Config] | type[Settings]) -> dict[str, pydantic.fields.FieldInfo]:
    return config.model_fields if issubclass(config, Config) else config.schema().model_fields


def _describe(config: type[Config] | type[Settings], prefix: str = "") -> list[str]:
    fields, lines = _fields(config), []
    for name, field in fields.items():
        if not issubclass(config, Config) and name not in own_fields(config):
            continue
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            lines += _describe(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
        shown = default if isinstance(default, str) and default else repr(default)
        lines.append(f"  {prefix}{name} ({shown}): {field.description}")
    return lines


def print_metrics(metrics: Mapping[str, object]) -> None:
    """One line for each, by name, with its standard error and number of values."""
    stems = {name: name.removesuffix("_mean") for name in metrics}
    parts = {f"{stem}{end}" for stem in stems.values() for end in ("_stderr", "_n")}
    for name, value in sorted(metrics.items()):
        if name not in parts:
            error, n = (metrics.get(f"{stems[name]}{end}") for end in ("_stderr", "_n"))
            about = ("" if error is None else f" ± {error:.2g}") + ("" if n is None else f" (n={n})")
            print((f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}") + about)
