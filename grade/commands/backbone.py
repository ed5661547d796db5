"""``python -m grade backbone``."""

from __future__ import annotations

import argparse

from grade.commands.options import add_config_options
from grade.prepare import BackboneConfig, prepare_backbone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--raw-dir", required=True, metavar="DIR", help="fetched packages")
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the model")
    add_config_options(parser, BackboneConfig)


def run(args: argparse.Namespace) -> None:
    """Convert the base model."""
    config = BackboneConfig.load(args.config, args.set)
    prepare_backbone(config, args.raw_dir, args.reviews, args.output_dir)
    print(f"wrote {args.output_dir}")
