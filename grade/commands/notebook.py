"""``python -m grade notebook``."""

from __future__ import annotations

import argparse
import sys

import yaml

from grade.config import read_yaml
from grade.errors import InputError
from grade.notebook import NotebookError, execute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("notebook", help="the source notebook")
    parser.add_argument("output", help="the executed copy")
    parser.add_argument("--params", action="append", default=[], metavar="FILE", help="YAML file of parameters")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="one parameter")


def run(args: argparse.Namespace) -> None:
    """Execute the notebook; an unknown parameter is an error."""
    parameters = {}
    for path in args.params:
        parameters |= read_yaml(path)
    for text in args.set:
        name, sign, value = text.partition("=")
        if not sign:
            raise InputError("--set", text, "NAME=VALUE")
        parameters[name] = yaml.safe_load(value)
    try:
        execute(args.notebook, args.output, parameters)
    except NotebookError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    print(f"wrote {args.output}")
