"""``python -m grade peers``."""

from __future__ import annotations

import argparse
from pathlib import Path

from grade.commands.options import add_config_options
from grade.peers import PeersConfig, run_peers
from grade.results import environment, write_history, write_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="metrics.json and curves.csv go here")
    add_config_options(parser, PeersConfig)


def run(args: argparse.Namespace) -> None:
    """Train our methods and TRL's GRPOTrainer on the same task, each in a process of its own."""
    curves, figures = run_peers(PeersConfig.load(args.config, args.set))
    about = {f"environment/{k}": v for k, v in environment().items()}
    write_history(Path(args.output_dir) / "curves.csv", curves.to_dict("records"))
    write_metrics(Path(args.output_dir) / "metrics.json", figures | about)
    for name, value in sorted(figures.items()):
        print(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
