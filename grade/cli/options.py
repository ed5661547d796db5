"""Options that commands share, and help that is written from a config's own fields."""

from __future__ import annotations

import argparse
from typing import Any

import pydantic

from grade.config import Config, Settings, own_fields


def add_config_options(
    parser: argparse.ArgumentParser, config: type[Config] | type[Settings], others: str = ""
) -> None:
    """Add ``--config`` and ``--set``, and list every key with its default and meaning below the options."""
    parser.add_argument("--config", action="append", default=[], metavar="FILE",
                        help="YAML file; may be given several times, later ones over earlier ones")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="one value over the files', for example --set seed=3")  # fmt: skip
    lines = _describe(config) + ([f"  ... {others}"] if others else [])
    parser.epilog = "config keys (default): meaning\n" + "\n".join(lines)


def _describe(config: type[Config] | type[Settings], prefix: str = "") -> list[str]:
    fields = config.schema().model_fields if issubclass(config, Settings) else config.model_fields
    inherited = [] if issubclass(config, Config) else [name for name in fields if name not in own_fields(config)]
    lines = []
    for name, field in fields.items():
        if name in inherited:
            continue
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            lines += _describe(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _show(field.get_default(call_default_factory=True))
        lines.append(f"  {prefix}{name} ({default}): {field.description}")
    return lines


def _show(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)
