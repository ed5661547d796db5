"""``python -m grade bench``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grade.commands.options import add_config_options
from grade.memory.bench import BenchConfig, bench_figures, chosen, compare, require_device, standard_steps
from grade.results import environment, replacing, write_metrics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", choices=["memory"], help="memory: peak of one training step, traced and measured")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure")
    parser.add_argument("--output", metavar="FILE", help="default: outputs/<device name>/memory.json")
    parser.add_argument("--metrics", metavar="FILE", help="headline figures go here")
    add_config_options(parser, BenchConfig)


def run(args: argparse.Namespace) -> None:
    """Measure the standard list of configurations."""
    config, about = BenchConfig.load(args.config, args.set), environment()
    require_device(args.device)
    name = "cpu" if args.device == "cpu" else about["device"].lower().replace(" ", "-")
    target = Path(args.output or f"outputs/{name}/memory.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    models = config.models if args.device == "cpu" else [""]
    steps = [step for model in models for step in chosen(standard_steps(args.device, model), config.steps)]
    rows = compare(steps, args.device, snapshots=target.parent)
    with replacing(target) as file:
        file.write(json.dumps({"environment": about, "steps": rows}, indent=1) + "\n")
    if args.metrics:
        figures = bench_figures(rows, args.device, config.time_traces)
        write_metrics(args.metrics, figures | {f"environment/{k}": v for k, v in about.items()})
    print(target)
