"""What commands share: options, help that is written from a config's own fields, metrics on the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import pydantic

from grade.config import Config, Settings, own_fields


def add_paths(parser: argparse.ArgumentParser, **texts: str) -> None:
    """Add a required option for each folder, or file (``metrics``), with its meaning."""
    for name, text in texts.items():
        metavar = "FILE" if name == "metrics" else "DIR"
        parser.add_argument(f"--{name.replace('_', '-')}", required=True, metavar=metavar, help=text)


def add_values(parser: argparse.ArgumentParser, option: str = "--config", value: str = "KEY=VALUE") -> None:
    """Add the option for YAML files and ``--set``, which goes over them."""
    parser.add_argument(option, action="append", default=[], metavar="FILE",
                        help="YAML file; may be given several times, later ones over earlier ones")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar=value,
                        help="one value over the files', for example --set seed=3")  # fmt: skip


def add_config(parser: argparse.ArgumentParser, config: type[Config] | type[Settings], others: str = "") -> None:
    """Add ``--config`` and ``--set``, and list every key with its default and meaning below the options."""
    add_values(parser)
    lines = _describe(config) + ([f"  ... {others}"] if others else [])
    parser.epilog = "config keys (default): meaning\n" + "\n".join(lines)


def _describe(config: type[Config] | type[Settings], prefix: str = "") -> list[str]:
    fields, lines = config.model_fields if issubclass(config, Config) else config.schema().model_fields, []
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
    """One line for each, by name."""
    for name, value in sorted(metrics.items()):
        print(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
