"""The command that trains a peer."""

from __future__ import annotations

import argparse
from importlib import import_module

from grade.cli.options import command, print_metrics
from grade.files import claimed

# By name: no wheel has the experiments.
measure = import_module("grade.experiments.compare.measure.peers")
peers = import_module("grade.experiments.compare.peers")


@command("peers", output_dir="metrics.json and curves.csv go here", config=measure.PeersConfig)
def _peers(args: argparse.Namespace) -> None:
    """Train our methods and TRL's GRPOTrainer on the same task, each in a process of its own."""
    config = measure.PeersConfig.load(args.config, args.set)
    with claimed(args.output_dir, (), shared=True):
        curves, costs, settings = measure.compare_peers(config)
        figures = peers.peer_figures(curves, costs) | settings
        peers.write_peers(args.output_dir, curves, figures)
    print_metrics(figures)
