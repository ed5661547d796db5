"""``grade memory``: what a training step needs, predicted."""

from __future__ import annotations

import argparse
import gc
import json

from grade.cli.options import command, option
from grade.config_files import load_config
from grade.memory.settings import StepConfig
from grade.results import progress


@command(
    "memory",
    option("--fits", metavar="SIZE",
           help="budget, for example 24GiB: say what batch fits and which single changes save most"),
    option("--overhead", metavar="SIZE",
           help="what a trace leaves out, added (default: 605MiB, as on an H100, with --fits on cuda; else 0)"),
    option("--device", choices=["cpu", "cuda"], default="cuda", help="where the step would run"),
    option("--all-layers", action="store_true", help="trace every layer instead of extrapolating"),
    option("--json", action="store_true", help="print JSON"),
    config=StepConfig,
)  # fmt: skip
def _memory(args: argparse.Namespace) -> None:
    """Trace a step and say what it needs and why."""
    # Here, so that --help starts without models.
    from grade.memory.plan import BEYOND_TRACE, largest_batch, parse_bytes, single_changes
    from grade.memory.report import report, text
    from grade.memory.trace import Trace, trace

    config = load_config(StepConfig, args.config, args.set)
    budget = None if args.fits is None else parse_bytes(args.fits)
    overhead = BEYOND_TRACE if budget is not None and args.device == "cuda" else 0
    if args.overhead is not None:
        overhead = 0 if args.overhead == "0" else parse_bytes(args.overhead, "overhead")
    gc.freeze()  # searching all that was imported for garbage takes a tenth of a trace's time
    with progress(None, "steps traced") as bar:

        def tracer(step: StepConfig) -> Trace:
            bar.set_postfix_str(f"{step.method} B={step.batch_size} T={step.max_new_tokens}")
            traced = trace(step, device=args.device, all_layers=args.all_layers)
            bar.update()
            return traced

        traced, fit, changes = tracer(config), None, []
        if budget is not None:
            fit = largest_batch(config, budget, overhead, tracer)
            changes = single_changes(config, traced, tracer)
    data = report(config, traced, overhead, fit, changes)
    print(json.dumps(data, indent=1) if args.json else text(config.headline, data, budget))
