"""``python -m grade bench``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grade.memory.bench import STANDARD, compare
from grade.results import environment, replacing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", choices=["memory"], help="memory: peak of one training step, traced and measured")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure")
    parser.add_argument("--output", metavar="FILE", help="default: outputs/<device name>/memory.json")


def run(args: argparse.Namespace) -> None:
    """Measure the standard list of configurations."""
    about = environment()
    name = "cpu" if args.device == "cpu" else about["device"].lower().replace(" ", "-")
    target = Path(args.output or f"outputs/{name}/memory.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = compare(STANDARD[args.device], args.device, snapshots=target.parent)
    with replacing(target) as file:
        file.write(json.dumps({"environment": about, "steps": rows}, indent=1) + "\n")
    print(target)
