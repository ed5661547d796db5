"""Commands of the experiments: execute a notebook, measure tables."""

import argparse
import os
import sys
from pathlib import Path

import grade
from grade.cli.options import command, option
from grade.config_files import parse_assignment, read_yaml
from grade.errors import InputError
from grade.experiments.claims import verdict_counts
from grade.pipeline.notebook import NotebookError, default_parameters, execute
from grade.pipeline.report import write_report

ROOT = Path(grade.__file__).parents[1]
"""Where the relative paths of a notebook's parameters start."""


@command(
    "notebook",
    option("notebook", help="the source notebook"),
    option("output", help="the executed copy"),
    files="--params",
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


@command("results", option("outputs", help="folder of results, such as outputs"))
def _results(args: argparse.Namespace) -> None:
    """Write README.md, claims.csv and claims.md in the folder."""
    if not Path(args.outputs).is_dir():
        raise InputError("outputs", args.outputs, "a folder of results")
    print(verdict_counts(write_report(args.outputs)), end="")
