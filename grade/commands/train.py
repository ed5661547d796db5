"""``python -m grade train``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from grade.commands.options import add_config_options
from grade.config import read_values
from grade.loop import train
from grade.methods import METHODS
from grade.train_config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--method", metavar="METHOD",
                        help=f"over the config's: {', '.join(METHODS)}; all: each, in its own folder")  # fmt: skip
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="adapter, history.csv, metrics.json, ...")
    add_config_options(parser, TrainConfig)


def run(args: argparse.Namespace) -> None:
    """Train, one method or all of them."""
    # Every config is checked before the first run starts.
    if args.method == "all":
        values = read_values(args.config, args.set)
        configs = [TrainConfig.parse(TrainConfig.values_for(method, values)) for method in METHODS]
    else:
        configs = [TrainConfig.load(args.config, args.set + ([f"method={args.method}"] if args.method else []))]
    for config in configs:
        output = Path(args.output_dir) / config.method if args.method == "all" else Path(args.output_dir)
        with _progress(config) as log:
            train(config, output, log)
        print(f"wrote {output}")


class _progress:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, config: TrainConfig) -> None:
        self.total, self.name = config.max_steps, config.method

    def __enter__(self) -> Callable[[str], None]:
        if not sys.stderr.isatty():
            return lambda line: print(line, flush=True)
        self.bar = tqdm(total=self.total, desc=self.name, unit="step", initial=-1)

        def log(line: str) -> None:
            self.bar.update(1)
            if "val/" in line:
                self.bar.write(line)

        return log

    def __exit__(self, *_) -> None:
        if sys.stderr.isatty():
            self.bar.close()
