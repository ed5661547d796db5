"""``python -m grade data``."""

from __future__ import annotations

import argparse
import json

from grade.commands.options import add_config_options
from grade.reviews import DataConfig, prepare_reviews


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--raw-dir", required=True, metavar="DIR", help="fetched packages")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="one .jsonl a split, and splits.json")
    add_config_options(parser, DataConfig)


def run(args: argparse.Namespace) -> None:
    """Clean and split."""
    print(json.dumps(prepare_reviews(DataConfig.load(args.config, args.set), args.raw_dir, args.output_dir)))
