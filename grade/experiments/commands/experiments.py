"""Commands of the experiments: execute a notebook, measure tables."""

import argparse
import gc
import os
import sys
from importlib import import_module

from grade.cli.options import command, option, values
from grade.config import parse_assignment, read_yaml
from grade.errors import InputError
from grade.experiments.measured import measure_all
from grade.pipeline.notebook import NotebookError, default_parameters, execute

RUNS = "folder of training runs, for an experiment that reads them (its parameter runs_dir)"
WITH_BASE = {"reviews_dir": True, "reward_dir": True, "bag_dir": True, "trunk_dir": True, "second_reward_dir": False,
             "gold_file": False}  # fmt: skip
"""Settings that an experiment reads with a ``backbone_dir`` only, and whether it then needs them."""


@command(
    "notebook",
    option("notebook", help="the source notebook"),
    option("output", help="the executed copy"),
    *values("--params", "NAME=VALUE"),
    option("--runs", metavar="DIR", help=RUNS),
)
def _notebook(args: argparse.Namespace) -> None:
    """Execute the notebook; an unknown parameter is an error."""
    _check_runs(args)
    parameters = {}
    for path in args.params:
        parameters |= read_yaml(path)
    parameters |= dict(parse_assignment(text, "NAME=VALUE") for text in args.set)
    if args.runs and "runs_dir" in default_parameters(args.notebook):
        parameters["runs_dir"] = args.runs
    if os.path.realpath(args.output) == os.path.realpath(args.notebook):
        raise InputError("output", args.output, "another file than the source notebook")
    try:
        execute(args.notebook, args.output, parameters)
    except NotebookError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    print(f"wrote {args.output}")


def _check_runs(args: argparse.Namespace) -> None:
    if args.runs is not None and not os.path.isdir(args.runs):
        raise InputError("--runs", args.runs, "a folder of training runs")


@command(
    "measure",
    option("experiment", help="a folder of grade/experiments"),
    *values(),
    option("--runs", metavar="DIR", help=RUNS),
    output_dir="measured/ and timings/ are written here",
)
def _measure(args: argparse.Namespace) -> None:
    """Measure every table of an experiment."""
    _check_runs(args)
    name = f"grade.experiments.{args.experiment}.measure.tables"
    try:
        experiment = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a package that is missing, not the experiment
        raise InputError("experiment", args.experiment, "a folder of grade/experiments") from None
    runs = [f"runs_dir={args.runs}"] if args.runs and "runs_dir" in experiment.Settings.model_fields else []
    settings = experiment.Settings.load(args.config, [*args.set, *runs])
    from grade.memory.models import model_config  # here, because a notebook starts without models
    from grade.memory.settings import require_device

    base = getattr(settings, "backbone_dir", None)
    for field, value in settings:  # a table that takes an hour may come before the first that reads them
        if base is not None and field in WITH_BASE and bool(value) != bool(base) and (value or WITH_BASE[field]):
            raise InputError(field, value, "a path with a backbone_dir, and nothing without: the toy task has its own")
        if isinstance(value, list) and any(value.count(part) > 1 for part in value):
            raise InputError(field, value, "different values: the same again would be counted twice")
        kind = "file" if field.endswith("_file") else "folder" if field.endswith("_dir") else ""
        if kind and value and not (os.path.isfile if kind == "file" else os.path.isdir)(value):
            raise InputError(field, value, f"a {kind} that exists, or nothing")
        if field == "trained_run" and value and settings.runs_dir and settings.backbone_dir:
            if not os.path.isdir(os.path.join(settings.runs_dir, value, "adapter")):
                raise InputError(field, value, f"a run with an adapter in {settings.runs_dir}")
        if field == "device":
            require_device(value)
        if field.endswith("model") and value:
            model_config(value, field)
    gc.freeze()  # searching imported modules for cycles is a tenth of a trace's time
    measure_all(experiment, settings, args.output_dir)
    print(f"wrote {args.output_dir}")
