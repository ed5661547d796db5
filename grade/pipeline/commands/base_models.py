"""Commands that make the experiments' base models."""

import argparse

from grade.cli.options import command, print_metrics
from grade.config_files import load_config
from grade.pipeline.base_model import BackboneConfig, PretrainConfig, prepare_backbone, pretrain
from grade.results import write_results


@command(
    "backbone",
    raw_dir="fetched packages",
    reviews="review splits",
    output_dir="folder of the model",
    config=BackboneConfig,
)
def _backbone(args: argparse.Namespace) -> None:
    """Convert the base model."""
    config = load_config(BackboneConfig, args.config, args.set)
    prepare_backbone(config, args.raw_dir, args.reviews, args.output_dir)
    print(f"wrote {args.output_dir}")


@command(
    "pretrain",
    reviews="review splits",
    output_dir="folder of the model",
    metrics="loss on the test split",
    config=PretrainConfig,
)
def _pretrain(args: argparse.Namespace) -> None:
    """Train the tiny language model and measure it on the test split."""
    config = load_config(PretrainConfig, args.config, args.set)
    metrics = pretrain(config, args.reviews, args.output_dir)
    write_results(args.metrics, metrics)
    print_metrics(metrics)
