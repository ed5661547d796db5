"""``grade memory``: what a training step needs, predicted."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grade.cli.options import command, option
from grade.config_files import origin, read_values
from grade.files import read_json
from grade.gradients.methods import AUTO, FALLBACK
from grade.memory.settings import StepConfig
from grade.results import progress

if TYPE_CHECKING:
    from grade.training.config import TrainConfig

TRAINING = {
    "per_device_train_batch_size": "batch_size", "max_completion_length": "max_new_tokens",
    "max_prompt_length": "prompt_tokens",
}  # fmt: skip
"""Training's names of what a step has; its other names are training's own."""


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
    """Trace a step, or a training run's from its own YAML, and say what it needs and why."""
    # Here, so that --help starts without models.
    from grade.memory.plan import BEYOND_TRACE, largest_batch, parse_bytes, single_changes
    from grade.memory.report import report, text
    from grade.memory.trace import Trace, trace

    config = step_of(args.config, args.set)
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


def step_of(files: Sequence[str], overrides: Sequence[str] = ()) -> StepConfig:
    """The step that YAML files and ``key=value`` describe; a run's own YAML is read with training's defaults.

    A file is a run's if it has a key that a step has not.
    """
    values, given = read_values(files), read_values((), overrides)
    if values.keys() - StepConfig.model_fields.keys():
        from grade.training.config import TrainConfig  # here, so that --help starts without it

        values = _step_of_run(TrainConfig.parse(values, *origin(files, ())))
    given = {TRAINING.get(name, name): value for name, value in given.items()}
    if isinstance(given.get("lora"), dict):
        given["lora"] = values.get("lora", {}) | given["lora"]
    return StepConfig.parse(values | given, *origin(files, overrides))


def _step_of_run(run: TrainConfig) -> dict[str, Any]:
    """A run's settings that memory depends on, as a step's."""
    kept = (
        "model", "quantization_config", "method", "gradient_checkpointing", "train_bias", "hops", "gumbel_topk",
        "num_generations",
    )  # fmt: skip
    values = {name: getattr(run, name) for name in kept if name in type(run).model_fields}
    values |= {"lora": run.lora.model_dump(), "dtype": "bfloat16" if run.bf16 else run.dtype}
    if run.attention != "auto":
        values["attention"] = run.attention
    values |= {step: value for name, step in TRAINING.items() if (value := getattr(run, name)) is not None}
    if run.method == AUTO:
        from grade.training.auto import choose_method

        chosen = choose_method(run, hasattr(run, "teacher"))[0]["method"]
        values["method"] = chosen if chosen == "grpo" else FALLBACK  # what begins
    for reward in [run.reward] if isinstance(run.reward, str) else run.reward:
        description = Path(reward) / "reward.json"
        if description.is_file():
            values["reward"] = read_json(description)["kind"]
        elif reward.startswith("hf:"):
            print(f"reward {reward} is not traced: --overhead adds what its weights take", file=sys.stderr)
    return values
