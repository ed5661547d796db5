"""``grade memory``: what a training step needs, predicted."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, get_args

from grade.cli.options import command, option
from grade.config import origin, read_values
from grade.errors import InputError
from grade.memory.settings import Sharding, StepConfig
from grade.results import progress

ALL = "all"
"""In place of a method's name: every method."""
PATIENCE, MOST_SECONDS = 180, 10**6
"""Seconds; a trace of a step takes a few."""


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Refuse what takes longer; signals reach the main thread only, so elsewhere nothing is refused."""
    allowed = "more seconds, or a smaller step: fewer GPUs, microbatches, rows or tokens, or a faster engine"
    refusal, over = InputError("--patience", seconds, allowed), list[bool]()

    def late(*_: object) -> None:
        over.append(True)
        raise refusal

    if not 0 < seconds <= MOST_SECONDS:
        raise InputError("--patience", seconds, f"more than 0, at most {MOST_SECONDS}")
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hook = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if isinstance(lost.exc_value, InputError) else hook(lost)
    # Again every second: Python drops what is raised where an object is freed.
    before, since = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    except Exception:
        if over:  # a library in which it was raised may have made another of it
            raise refusal from None
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, *since)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


@command(
    "memory",
    option("--fits", metavar="SIZE", help="budget, for example 24GiB: say what fits and what saves most"),
    option("--overhead", metavar="SIZE",
           help="what a trace leaves out, added (default: 605MiB, as on an H100, with --fits on cuda; else 0)"),
    option("--gpus", type=int, default=1, metavar="N", help="GPUs that train together, each a batch"),
    option("--shard", choices=get_args(Sharding), default="fsdp2",
           help="fsdp2: they divide the base; ddp: each holds a copy"),
    option("--device", choices=["cpu", "cuda"], default="cuda", help="where the step would run"),
    option("--patience", type=float, default=PATIENCE, metavar="SECONDS",
           help=f"give up after this time (default: {PATIENCE})"),
    option("--all-layers", action="store_true", help="trace every layer instead of extrapolating"),
    option("--json", action="store_true", help="print JSON"),
    config=StepConfig,
)  # fmt: skip
def _memory(args: argparse.Namespace) -> None:
    """Trace a step and say what it needs and why."""
    # Here, so that --help starts without models.
    from grade.memory import plan
    from grade.memory.allocator import BEYOND_TRACE, reserved_by
    from grade.memory.report import methods_text, report, text
    from grade.memory.trace import Trace, trace

    values = read_values(args.config, args.set)  # once: a file may be a pipe
    budget = None if args.fits is None else plan.parse_bytes(args.fits)
    overhead = BEYOND_TRACE if budget is not None and args.device == "cuda" else 0
    if args.overhead is not None:
        overhead = 0 if args.overhead == "0" else plan.parse_bytes(args.overhead, "overhead")
    counts = plan.GPUS if args.gpus == 1 else (args.gpus,)
    with progress(None, "steps traced") as bar, _within(args.patience), contextlib.ExitStack() as after:
        gc.disable()  # searching for garbage takes a tenth of a trace's time, and finds little
        after.callback(gc.enable)

        @plan.remembering
        def known(step: Any, gpus: int, way: plan.Way) -> Trace:
            bar.set_postfix_str(f"{step.method} B={step.batch_size} T={step.max_new_tokens}")
            several = {} if gpus == 1 else dict(processes=gpus, sharding=way)
            traced = trace(step, device=args.device, all_layers=args.all_layers, **several)
            bar.update()
            return traced

        def tracer(step: Any, gpus: int = args.gpus, way: plan.Way = args.shard) -> Trace:
            return known(step, gpus, "none" if gpus == 1 else way)

        if values.get("method") == ALL:
            if args.fits is not None:
                raise InputError("fits", args.fits, f"none with --method {ALL}: a budget is for one method")
            rows = plan.compare_methods(plan.every_method(values), tracer)
            print(json.dumps(rows, indent=1) if args.json else methods_text(rows))
            return
        else:
            config = StepConfig.parse(values, *origin(args.config, args.set))
            # The engines whose every token is a pass with gradient through all layers take long without extrapolation.
            replayed = config.engine_name not in ("unrolled", "checkpointed") or args.all_layers
        more, traced = {}, tracer(config)
        if budget is not None:
            more["ways"] = plan.ways_to_run(config, budget - overhead, tracer, counts)
            more["fits"] = plan.plan(config, budget, overhead, tracer=tracer)
            more["changes"] = plan.single_changes(config, traced, tracer)
        if replayed and args.device == "cuda":
            more["reserved"] = reserved_by(config, args.gpus, args.shard)
    data = report(config, traced, gpus=args.gpus, overhead=overhead, **more)
    if args.json:
        print(json.dumps(data, indent=1))
    else:
        print(text(config.headline, data, budget))
