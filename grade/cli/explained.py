"""The command that says, before training, what texts explain of a reward."""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from rich.console import Console

from grade.cli.options import command, option
from grade.cli.runs import rich_table
from grade.errors import InputError
from grade.files import atomic, check_apart, check_file, write_json
from grade.results import environment
from grade.training.explained import ExplainConfig, Explained, explain, figure

SHOWN = 10
"""Tokens of each end."""
ENDINGS = (".png", ".svg", ".pdf")


@command(
    "explained",
    option("--json", metavar="FILE", help="write everything here as well"),
    option("--figure", metavar="FILE", help="draw it here: a .png, .svg or .pdf"),
    config=ExplainConfig,
)
def _explained(args: argparse.Namespace) -> None:
    """Print what scored texts explain of a reward, and what that promises."""
    config = ExplainConfig.load(args.config, args.set)
    if args.json is not None:
        check_file(args.json, "--json")
    if args.figure is not None:
        if not args.figure.lower().endswith(ENDINGS):
            raise InputError("--figure", args.figure, f"a file whose name ends in {', '.join(ENDINGS)}")
        check_file(args.figure, "--figure", Path(args.figure).suffix)
    check_apart({"--json": args.json, "--figure": args.figure})
    result = explain(config)
    _show(result, config)
    if args.json is not None:
        content = {"environment": environment(), "config": config.model_dump(), **result.as_dict()}
        write_json(args.json, content)
    if args.figure is not None:
        drawn = figure(result)
        with atomic(args.figure) as staging:
            drawn.savefig(staging)


def _show(result: Explained, config: ExplainConfig) -> None:
    console = Console(markup=False, highlight=False, emoji=False)
    known = result.curve.rename(columns={"held_out": "R2 (other texts)", "policy": "R2 (reference)"}).dropna(axis=1)
    console.print(f"explained of {config.reward} by {result.texts} texts", soft_wrap=True)
    console.print("", rich_table(known), sep="\n")
    ends = [result.tokens[result.tokens["rank"] * sign > 0].sort_values("rank", key=abs) for sign in (1, -1)]
    best, worst = (", ".join(map(repr, table["token"].head(SHOWN))) for table in ends)
    console.print(f"\n{result.best} likes: {best}\ndislikes: {worst}", soft_wrap=True)
    table = result.promise.rename(columns={"kl": "KL", "gain": "promised gain"})
    untrained = pd.DataFrame([{"KL": 0.0, "promised gain": 0.0, "reward": result.reward}])
    console.print("", rich_table(pd.concat([untrained, table])), sep="\n")
