"""The command that trains a peer."""

from __future__ import annotations

import argparse

from grade.cli.options import command, print_metrics
from grade.experiments.compare.measure.peers import PeersConfig, compare_peers
from grade.experiments.compare.peers import peer_figures, write_peers
from grade.files import claimed


@command("peers", output_dir="metrics.json and curves.csv go here", config=PeersConfig)
def _peers(args: argparse.Namespace) -> None:
    """Train our methods and TRL's GRPOTrainer on the same task, each in a process of its own."""
    config = PeersConfig.load(args.config, args.set)
    with claimed(args.output_dir, (), shared=True):
        curves, costs, settings = compare_peers(config)
        figures = peer_figures(curves, costs) | settings
        write_peers(args.output_dir, curves, figures)
    print_metrics(figures)
