"""Commands that make the experiments' base models."""

from __future__ import annotations

import argparse
from importlib import import_module

from grade.cli.options import command, print_metrics
from grade.files import check_file
from grade.results import write_results

base_model = import_module("grade.experiments.base_model")  # by name: no wheel has the experiments


@command(
    "backbone",
    raw_dir="fetched packages",
    reviews="review splits",
    output_dir="folder of the model",
    config=base_model.BackboneConfig,
)
def _backbone(args: argparse.Namespace) -> None:
    """Convert the base model."""
    config = base_model.BackboneConfig.load(args.config, args.set)
    base_model.prepare_backbone(config, args.raw_dir, args.reviews, args.output_dir)
    print(f"wrote {args.output_dir}")


@command(
    "pretrain",
    reviews="review splits",
    output_dir="folder of the model",
    metrics="loss on the test split",
    config=base_model.PretrainConfig,
)
def _pretrain(args: argparse.Namespace) -> None:
    """Train the tiny language model and measure it on the test split."""
    config = base_model.PretrainConfig.load(args.config, args.set)
    check_file(args.metrics, "--metrics")
    metrics = base_model.pretrain(config, args.reviews, args.output_dir)
    write_results(args.metrics, metrics)
    print_metrics(metrics)
