"""Commands on the memory of a step: predicted and measured."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from grade.cli.options import add_config_options
from grade.config import Config
from grade.errors import InputError
from grade.files import check_file, write_text
from grade.memory.allocator import Replay, reserved
from grade.memory.bench import BenchConfig, bench_figures, chosen, compare, require_device, standard_steps
from grade.memory.compare import ALL, compare_methods, every_method
from grade.memory.decoding import quick_trace
from grade.memory.plan import Quantity, parse_bytes, plan, remembering, single_changes
from grade.memory.report import as_json, as_text, methods_json, methods_text
from grade.memory.settings import COUNTS, Setting, Way, settings
from grade.memory.sharded import Sharding
from grade.memory.step import StepConfig
from grade.memory.trace import Trace, trace
from grade.results import environment, write_results


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
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="GPUs that train together, each a batch")
    parser.add_argument("--shard", choices=get_args(Sharding), default="fsdp2",
                        help="fsdp2: they divide the base; ddp: each holds a copy")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="where the step would run")
    parser.add_argument("--all-layers", action="store_true", help="trace every layer instead of extrapolating")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_options(parser, StepConfig)


def run_memory(args: argparse.Namespace) -> None:
    """Trace a step and say what it needs and why."""
    given = {name: getattr(args, name) for name in StepConfig.model_fields if getattr(args, name, None) is not None}
    options = {name: _text(value) for name, value in given.items()}
    budget = None if args.fits is None else parse_bytes(args.fits)
    overhead = 0 if args.overhead is None else parse_bytes(args.overhead, "overhead")
    with _without_gc(), _watched(_tracer(args)) as traced:
        known = remembering(traced)

        def tracer(step: StepConfig, gpus: int = args.gpus, way: Way = args.shard) -> Trace:
            return known(step, gpus, "none" if gpus == 1 else way)

        if options.get("method") == ALL:
            _run_methods(args, options, tracer)
            return
        config = StepConfig.load(args.config, args.set, [f"{name}={value}" for name, value in options.items()])
        found, fits, changes, ways = tracer(config), [], [], []
        if budget is not None:
            ways = settings(config, budget - overhead, tracer, COUNTS if args.gpus == 1 else (args.gpus,))
            fits = plan(config, budget, overhead, tracer=tracer, first=_first(ways, config, args))
            changes = single_changes(config, found, tracer)
        allocated = _reserved(config, args)
    if args.json:
        print(json.dumps(as_json(config, found, overhead, fits, changes, args.gpus, allocated, ways), indent=1))
    else:
        print(as_text(config, found, overhead, fits, changes, budget, args.gpus, allocated, ways))


def _tracer(args: argparse.Namespace) -> Callable[..., Trace]:
    """A tracer of the command's step, or of one of several GPUs that share it in another way."""

    def tracer(step: StepConfig, gpus: int, way: Way) -> Trace:
        several = dict(processes=gpus, sharding=way) if gpus != 1 else {}
        if args.all_layers:
            return trace(step, device=args.device, all_layers=True, **several)
        return quick_trace(step, args.device, **several)

    return tracer


def _first(ways: Sequence[Setting], config: StepConfig, args: argparse.Namespace) -> dict[Quantity, int | None]:
    """What the settings say of the configured one."""
    way = args.shard if args.gpus > 1 else "none"
    wanted = (args.gpus, way, config.gradient_checkpointing)
    own = [w for w in ways if (w.gpus, w.sharding, w.gradient_checkpointing) == wanted]
    return {name: getattr(own[0], name) for name in ("batch_size", "max_new_tokens")} if own else {}


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Search nothing for garbage while tracing: it takes a tenth of the time, and leaves little."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _watched(tracer: Callable[..., Trace]) -> Iterator[Callable[..., Trace]]:
    """A tracer that shows on a terminal how many steps it has traced, and which one it traces."""
    from tqdm.auto import tqdm

    quiet = True if os.environ.get("GRADE_PROGRESS") == "0" else None  # None: shown on a terminal only
    with tqdm(desc="steps traced", unit="", leave=False, disable=quiet) as bar:

        def traced(step: StepConfig, *more: Any) -> Trace:
            bar.set_postfix_str(f"{step.method} B={step.batch_size} T={step.max_new_tokens}")
            found = tracer(step, *more)
            bar.update()
            return found

        yield traced


def _reserved(config: StepConfig, args: argparse.Namespace) -> Replay | None:
    """The allocator's peaks, of the steps that run on CUDA and whose layers can all be traced in seconds."""
    loops = config.engine_name in ("unrolled", "checkpointed")  # each token is a pass with gradient through all layers
    if args.device != "cuda" or (loops and not args.all_layers):
        return None
    return reserved(config, "cuda", args.gpus, args.shard)


def _run_methods(args: argparse.Namespace, options: dict[str, str], tracer: Callable[..., Trace]) -> None:
    """The table of every method."""
    if args.fits is not None:
        raise InputError("fits", args.fits, f"none with --method {ALL}: a budget is for one method")
    batch = options.pop("batch_size", None)
    if batch is not None:
        batch = StepConfig.load(options=[f"batch_size={batch}"]).batch_size
    rows = compare_methods(every_method(args.config, args.set, options, batch), tracer)
    print(json.dumps(methods_json(rows), indent=1) if args.json else methods_text(rows))


def _metavar(name: str, choices: list[str] | None) -> str:
    return "{" + ",".join(choices) + "}" if choices else name.upper()


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
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
    target.parent.mkdir(parents=True, exist_ok=True)
    models = config.models if args.device == "cpu" else [""]
    steps = [step for model in models for step in chosen(standard_steps(args.device, model), config.steps)]
    rows = compare(steps, args.device, snapshots=target.parent)
    # With metrics it is the pipeline's run, whose files are the same bytes the next time: times stand in timings.json.
    if args.metrics is not None:
        timed = {f"{row['name']}/seconds": row.pop("seconds") for row in rows if "seconds" in row}
        write_results(args.metrics, bench_figures(rows, args.device, config.time_traces) | timed)
    content = {"steps": rows} if args.metrics is not None else {"environment": about, "steps": rows}
    write_text(target, json.dumps(content, indent=1) + "\n")
    print(target)
