"""Commands of the experiments: execute a notebook, measure tables."""

import argparse
import gc
import os
import sys
from importlib import import_module
from pathlib import Path

import grade
from grade.cli.options import command, option, values
from grade.config_files import load_config, parse_assignment, read_yaml
from grade.errors import InputError
from grade.experiments.claims import verdict_counts
from grade.experiments.measured import measure_all
from grade.experiments.report import write_report
from grade.pipeline.notebook import NotebookError, default_parameters, execute

ROOT = Path(grade.__file__).parents[1]
"""Where the relative paths of a notebook's parameters start."""
RUNS = "folder of training runs, for an experiment that reads them (its parameter runs_dir)"


@command(
    "notebook",
    option("notebook", help="the source notebook"),
    option("output", help="the executed copy"),
    *values("--params", "NAME=VALUE"),
)
def _notebook(args: argparse.Namespace) -> None:
    """Execute the notebook; an unknown parameter is an error. Its results go beside the executed copy."""
    parameters = {}
    for path in args.params:
        parameters |= read_yaml(path)
    parameters |= dict(parse_assignment(text, "NAME=VALUE") for text in args.set)
    if "output_dir" in default_parameters(args.notebook):
        parameters.setdefault("output_dir", os.path.relpath(Path(args.output).parent, ROOT))
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


@command("results", option("outputs", help="folder of results, such as outputs"))
def _results(args: argparse.Namespace) -> None:
    """Write README.md, claims.csv and claims.md in the folder."""
    if not Path(args.outputs).is_dir():
        raise InputError("outputs", args.outputs, "a folder of results")
    print(verdict_counts(write_report(args.outputs)), end="")
