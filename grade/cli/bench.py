"""``grade bench``: measured on this machine what is otherwise predicted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grade.cli.options import add_config_options
from grade.files import check_file, write_text
from grade.memory.bench import BenchConfig, bench_figures, compare_with_real, require_device, standard_steps
from grade.results import environment, write_results


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["memory"], help="memory: peak of one training step, traced and measured")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure")
    parser.add_argument("--output", metavar="FILE", help="default: outputs/<device name>/memory.json")
    parser.add_argument("--metrics", metavar="FILE", help="headline figures go here")
    add_config_options(parser, BenchConfig)
    parser.set_defaults(execute=_bench)


def _bench(args: argparse.Namespace) -> None:
    """Measure the standard list of configurations."""
    config, about = BenchConfig.load(args.config, args.set), environment()
    require_device(args.device)
    name = "cpu" if args.device == "cpu" else about["device"].lower().replace(" ", "-")
    target = Path(f"outputs/{name}/memory.json" if args.output is None else args.output)
    check_file(target, "--output")
    if args.metrics is not None:
        check_file(args.metrics, "--metrics")
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = compare_with_real(standard_steps(args.device, config), args.device, snapshots=target.parent)
    # With metrics it is the pipeline's run, whose files are the same bytes the next time: times stand in timings.json.
    if args.metrics is not None:
        timed = {f"{row['name']}/seconds": row.pop("seconds") for row in rows if "seconds" in row}
        write_results(args.metrics, bench_figures(rows, args.device, config.time_traces) | timed)
    content = {"steps": rows} if args.metrics is not None else {"environment": about, "steps": rows}
    write_text(target, json.dumps(content, indent=1) + "\n")
    print(target)
