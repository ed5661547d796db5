"""What commands share: options, help that is written from a config's own fields, metrics on the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from grade.config import Config

ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {}
"""By command, what adds its options and the function that executes them."""
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **settings: Any) -> Option:
    """An option, as for ``ArgumentParser.add_argument``."""
    return names, settings


def command(
    name: str, *options: Option, config: type[Config] | None = None, files: str = "", **paths: str
) -> Callable[[Callable], Callable]:
    """Decorate the function that executes a command, from its options.

    ``paths`` are required options for folders, or a file (``metrics``), with their meanings. ``files`` is the option
    for YAML files, beside which there is ``--set``. With a config it is ``--config``, and the config's keys are listed
    below the options with default and meaning.
    """
    files = files or ("--config" if config else "")
    values = [
        option(files, action="append", default=[], metavar="FILE",
               help="YAML file; may be given several times, later ones over earlier ones"),
        option("--set", action="append", default=[], metavar="KEY=VALUE",
               help="one value over the files', for example --set seed=3"),
    ] if files else []  # fmt: skip

    def registered(execute: Callable) -> Callable:
        def add(parser: argparse.ArgumentParser) -> None:
            required = [option(f"--{key.replace('_', '-')}", required=True, help=text,
                               metavar="FILE" if key == "metrics" else "DIR")
                        for key, text in paths.items()]  # fmt: skip
            for names, settings in (*options, *required, *values):
                parser.add_argument(*names, **settings)
            if config:
                lines = [f"  {key} {text}" for key, text in config.described()]
                parser.epilog = "config keys (--set KEY=VALUE, or --KEY VALUE; default): meaning\n" + "\n".join(lines)
            parser.set_defaults(execute=execute)

        ADD[name] = add
        return execute

    return registered


def print_metrics(metrics: Mapping[str, object]) -> None:
    """One line for each, by name, with its standard error and number of values."""
    stems = {name: name.removesuffix("_mean") for name in metrics}
    parts = {f"{stem}{end}" for stem in stems.values() for end in ("_stderr", "_n")}
    for name, value in sorted(metrics.items()):
        if name not in parts:
            error, n = (metrics.get(f"{stems[name]}{end}") for end in ("_stderr", "_n"))
            about = ("" if error is None else f" ± {error:.2g}") + ("" if n is None else f" (n={n})")
            print((f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}") + about)
