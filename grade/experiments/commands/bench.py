"""``grade bench``: measured on this machine what is otherwise predicted."""

import argparse
import json
from pathlib import Path

from grade.cli.options import command, option
from grade.config_files import load_config
from grade.experiments.bench import BenchConfig, bench_figures, compare_with_real, standard_steps
from grade.files import write_text
from grade.results import environment, write_results


@command(
    "bench",
    option("what", choices=["memory"], help="memory: peak of one training step, traced and measured"),
    option("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure"),
    option("--output", metavar="FILE", help="default: outputs/<device name>/memory.json"),
    option("--metrics", metavar="FILE", help="headline figures go here"),
    config=BenchConfig,
)
def _bench(args: argparse.Namespace) -> None:
    """Measure the standard list of configurations."""
    config, about = load_config(BenchConfig, args.config, args.set), environment()
    steps = standard_steps(args.device, config)
    name = "cpu" if args.device == "cpu" else about["device"].lower().replace(" ", "-")
    target = Path(f"outputs/{name}/memory.json" if args.output is None else args.output)
    target.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in compare_with_real(steps, args.device, config.processes):
        rows.append(row)
        if not args.metrics:  # what is measured stays, whatever comes
            write_text(target, json.dumps({"environment": about, "steps": rows}, indent=1) + "\n")
    # With metrics it is the pipeline's run, whose files are the same bytes the next time: times stand in timings.json.
    if args.metrics:
        timed = {f"{row['name']}/seconds": row.pop("seconds") for row in rows if "seconds" in row}
        write_results(args.metrics, bench_figures(rows, args.device) | timed)
        write_text(target, json.dumps({"steps": rows}, indent=1) + "\n")
    print(target)
