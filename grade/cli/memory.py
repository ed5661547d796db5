"""Commands on the memory of a step: predicted and measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from grade.cli.options import add_config_options
from grade.config import Config
from grade.memory.bench import BenchConfig, bench_figures, chosen, compare, require_device, standard_steps
from grade.memory.plan import parse_bytes, plan, remembering, shard, single_changes
from grade.memory.report import as_json, as_text
from grade.memory.step import StepConfig
from grade.memory.trace import trace
from grade.outputs import check_file, writing
from grade.results import environment, replacing, write_results


def add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options: one for each plain key of `StepConfig`."""
    for name, field in StepConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            continue  # lora.*: by --set
        flag = "--" + name.replace("_", "-")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", default=None, help=field.description)
        else:
            choices = [str(c) for c in get_args(field.annotation)] if get_origin(field.annotation) is Literal else None
            parser.add_argument(flag, metavar=_metavar(name, choices), help=field.description)
    parser.add_argument("--fits", metavar="SIZE", help="budget, for example 24GiB: say what fits and what saves most")
    parser.add_argument("--overhead", metavar="SIZE", help="what a trace leaves out (context, fragmentation), added")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that divide the weights (FSDP)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where the step would run")
    parser.add_argument("--all-layers", action="store_true", help="trace every layer instead of extrapolating")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_options(parser, StepConfig)


def run_memory(args: argparse.Namespace) -> None:
    """Trace a step and say what it needs and why."""
    given = [(name, getattr(args, name)) for name in StepConfig.model_fields if getattr(args, name, None) is not None]
    config = StepConfig.load(args.config, args.set, [f"{name}={_text(value)}" for name, value in given])
    budget = None if args.fits is None else parse_bytes(args.fits)
    overhead = 0 if args.overhead is None else parse_bytes(args.overhead, "overhead")

    @remembering
    def tracer(step: StepConfig):
        return shard(trace(step, device=args.device, all_layers=args.all_layers), step, args.gpus)

    found = tracer(config)
    fits, changes = [], []
    if budget is not None:
        fits, changes = plan(config, budget, overhead, tracer=tracer), single_changes(config, found, tracer)
    if args.json:
        print(json.dumps(as_json(config, found, overhead, fits, changes, args.gpus), indent=1))
    else:
        print(as_text(config, found, overhead, fits, changes, budget, args.gpus))


def _metavar(name: str, choices: list[str] | None) -> str:
    return "{" + ",".join(choices) + "}" if choices else name.upper()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", choices=["memory"], help="memory: peak of one training step, traced and measured")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to measure")
    parser.add_argument("--output", metavar="FILE", help="default: outputs/<device name>/memory.json")
    parser.add_argument("--metrics", metavar="FILE", help="headline figures go here")
    add_config_options(parser, BenchConfig)


def run_bench(args: argparse.Namespace) -> None:
    """Measure the standard list of configurations."""
    config, about = BenchConfig.load(args.config, args.set), environment()
    require_device(args.device)
    name = "cpu" if args.device == "cpu" else about["device"].lower().replace(" ", "-")
    target = Path(f"outputs/{name}/memory.json" if args.output is None else args.output)
    check_file(target, "--output")
    if args.metrics is not None:
        check_file(args.metrics, "--metrics")
    with writing(target, "--output", "file"):
        target.parent.mkdir(parents=True, exist_ok=True)
    models = config.models if args.device == "cpu" else [""]
    steps = [step for model in models for step in chosen(standard_steps(args.device, model), config.steps)]
    rows = compare(steps, args.device, snapshots=target.parent)
    # With metrics it is the pipeline's run, whose files are the same bytes the next time: times stand in timings.json.
    if args.metrics is not None:
        timed = {f"{row['name']}/seconds": row.pop("seconds") for row in rows if "seconds" in row}
        write_results(args.metrics, bench_figures(rows, args.device, config.time_traces) | timed)
    content = {"steps": rows} if args.metrics is not None else {"environment": about, "steps": rows}
    with replacing(target) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    print(target)
