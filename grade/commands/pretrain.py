"""``python -m grade pretrain``."""

from __future__ import annotations

import argparse

from grade.commands.options import add_config_options
from grade.results import write_metrics
from grade.tiny_lm import PretrainConfig, pretrain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the model")
    parser.add_argument("--metrics", required=True, metavar="FILE", help="loss on the test split")
    add_config_options(parser, PretrainConfig)


def run(args: argparse.Namespace) -> None:
    """Train the tiny language model and measure it on the test split."""
    metrics = pretrain(PretrainConfig.load(args.config, args.set), args.reviews, args.output_dir)
    write_metrics(args.metrics, metrics)
    for name, value in sorted(metrics.items()):
        print(f"{name} {value:.4g}")
