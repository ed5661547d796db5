"""Commands of the experiments: execute a notebook, measure tables."""

import argparse
import gc
import os
import sys
from importlib import import_module

from grade.cli.options import command, option, values
from grade.config_files import load_config, parse_assignment, read_yaml
from grade.errors import InputError
from grade.experiments.measured import measure_all
from grade.pipeline.notebook import NotebookError, default_parameters, execute

RUNS = "folder of training runs, for an experiment that reads them (its parameter runs_dir)"


@command(
    "notebook",
    option("notebook", help="the source notebook"),
    option("output", help="the executed copy"),
    *values("--params", "NAME=VALUE"),
    option("--runs", metavar="DIR", help=RUNS),
)
def _notebook(args: argparse.Namespace) -> None:
    """Execute the notebook; an unknown parameter is an error."""
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


@command(
    "measure",
    option("experiment", help="a folder of grade/experiments"),
    *values(),
    option("--runs", metavar="DIR", help=RUNS),
    output_dir="measured/ and timings/ are written here",
)
def _measure(args: argparse.Namespace) -> None:
    """Measure every table of an experiment."""
    name = f"grade.experiments.{args.experiment}.measure.tables"
    try:
        experiment = import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a package that is missing, not the experiment
        raise InputError("experiment", args.experiment, "a folder of grade/experiments") from None
    runs = [f"runs_dir={args.runs}"] if args.runs and "runs_dir" in experiment.Settings.model_fields else []
    settings = load_config(experiment.Settings, args.config, [*args.set, *runs])
    gc.freeze()  # searching imported modules for cycles is a tenth of a trace's time
    measure_all(experiment, settings, args.output_dir)
    print(f"wrote {args.output_dir}")
