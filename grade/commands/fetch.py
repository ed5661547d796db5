"""``python -m grade fetch``."""

from __future__ import annotations

import argparse

from grade.commands.options import add_config_options
from grade.fetch import FetchConfig, fetch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="one folder a package is made here")
    add_config_options(parser, FetchConfig)


def run(args: argparse.Namespace) -> None:
    """Download, check and unpack."""
    fetch(FetchConfig.load(args.config, args.set), args.output_dir)
    print(f"wrote {args.output_dir}")
