"""Options that commands share, and help that is written from a config's own fields."""

from __future__ import annotations

import argparse
from typing import Any

import pydantic


def add_config_options(parser: argparse.ArgumentParser, config: type[pydantic.BaseModel]) -> None:
    """Add ``--config`` and ``--set``, and list every key with its default and meaning below the options.

    Args:
        parser: The command's parser.
        config: The config class.
    """
    parser.add_argument("--config", action="append", default=[], metavar="FILE",
                        help="YAML file; may be given several times, later ones over earlier ones")  # fmt: skip
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE",
                        help="one value over the files', for example --set seed=3")  # fmt: skip
    parser.epilog = "config keys (default): meaning\n" + "\n".join(_describe(config))


def _describe(config: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    lines = []
    for name, field in config.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            lines += _describe(inner, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _show(field.get_default(call_default_factory=True))
        lines.append(f"  {prefix}{name} ({default}): {field.description}")
    return lines


def _show(value: Any) -> str:
    return value if isinstance(value, str) and value else repr(value)
