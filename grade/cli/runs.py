"""Commands that look at a run, and take its adapter with them."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path

import numpy as np
import pandas as pd

from grade.cli.options import command, option
from grade.errors import InputError
from grade.files import read_json

COLUMNS = {"step": "step", "train/reward": "reward", "train/kl": "KL per token", "val/reward_mean": "held-out reward",
           "val/reward_stderr": "± standard error"}  # fmt: skip
HISTORY_ROWS = 10
TILT_FILE = "tilt.json"
"""What `grade tilt` found."""


@command(
    "show",
    option("run", metavar="RUN", help="a run's folder, finished or not"),
    option("--step", type=int, metavar="N", help="completions of this step (default: the newest)"),
    option("--rows", type=int, default=5, metavar="N", help="completions of each table (default: 5)"),
)
def _show(args: argparse.Namespace) -> None:
    """Print a run's history, completions of one step with their rewards, and what a token bias prefers."""
    run = Path(args.run)
    if (run / TILT_FILE).is_file() and not (run / "history.csv").is_file():
        print(*read_json(run / TILT_FILE)["summary"], sep="\n")
        return
    history = _history(run)
    print(history.to_string(index=False, na_rep="", float_format="{:.4g}".format))
    paths = sorted(run.glob("completions/*_*.parquet"))
    steps = {int(path.stem.rpartition("_")[2]) for path in paths}
    step = max(steps, default=0) if args.step is None else args.step
    if args.step is not None and step not in steps:
        raise InputError("--step", step, f"a step with completions: {', '.join(map(str, sorted(steps)))}")
    for path in paths:
        kind, _, number = path.stem.rpartition("_")
        if int(number) == step:
            _print_table(kind, step, pd.read_parquet(path), args.rows)
    _print_tokens(run)


def _print_tokens(run: Path) -> None:
    """Tokens with the largest and the smallest bias, if there is one and its base is at hand."""
    from transformers import AutoTokenizer  # here: --help needs no torch

    from grade.models.token_bias import saved_bias
    from grade.training.checkpoint import last_checkpoint
    from grade.training.fit_bias import extremes

    folder = last_checkpoint(run) or run / "adapter"
    values, base = saved_bias(folder)
    if values is None:
        return
    with contextlib.suppress(OSError, ValueError):
        tokenizer = AutoTokenizer.from_pretrained(base, trust_remote_code=False)
        for name, tokens in zip(("more", "less"), extremes(values, tokenizer), strict=True):
            print(f"\nwritten {name}  {' '.join(map(repr, tokens))}")


def _history(run: Path) -> pd.DataFrame:
    """Some rows: those with an evaluation where there are several, evenly spaced, with the first and the last."""
    from grade.training.checkpoint import last_checkpoint  # here: --help needs no torch
    from grade.training.logs import history_rows

    if checkpoint := last_checkpoint(run):  # a run that has not finished, or one from Python
        history = pd.DataFrame(history_rows(read_json(checkpoint / "trainer_state.json")["log_history"]))
    elif (run / "history.csv").is_file():
        history = pd.read_csv(run / "history.csv")
    else:
        raise InputError("RUN", str(run), "a run's folder, with checkpoints or history.csv")
    history = history.reindex(columns=list(COLUMNS)).rename(columns=COLUMNS).dropna(axis=1, how="all")
    evaluated = history[history["held-out reward"].notna()] if "held-out reward" in history else history[:0]
    rows = evaluated if len(evaluated) > 2 else history
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, HISTORY_ROWS).round().astype(int))]


def _print_table(kind: str, step: int, table: pd.DataFrame, rows: int) -> None:
    parts = [name for name in table if name.startswith("rewards/")]
    shown = table[["prompt", "completion", "reward", *(parts if len(parts) > 1 else [])]].head(rows)
    width = max(20, (shutil.get_terminal_size().columns - 12 * (len(shown.columns) - 2)) // 2)
    print(f"\n{kind}, step {step}: {len(shown)} of {len(table)} completions")
    texts = {name: lambda text: _on_one_line(text, width) for name in ("prompt", "completion")}
    print(shown.to_string(index=False, float_format="{:.4g}".format, formatters=texts))


def _on_one_line(text: str, width: int) -> str:
    """A text on one line, without what a terminal would obey, shortened to ``width``."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= width else f"{text[: width - 1]}…"


@command(
    "merge",
    option("run", metavar="RUN", help="folder of a finished run, of an adapter or of a checkpoint"),
    option("out", metavar="OUT", help="folder of the model; must not exist, or be empty"),
    option("--dtype", metavar="TYPE",
           help="of the weights (default: the base's); bfloat16 loses part of the adapter"),
)  # fmt: skip
def _merge(args: argparse.Namespace) -> None:
    """Write a plain transformers folder."""
    from grade.training.merge import LOGIT_BIAS_FILE, merge  # here: --help needs no torch

    merged = merge(args.run, args.out, args.dtype)
    print(f"wrote {args.out} ({str(merged.dtype).removeprefix('torch.')})")
    if merged.token_bias == "head":
        print("the token bias is in the head's own bias")
    elif merged.token_bias is not None:
        print("the token bias is sequence_bias in generation_config.json, which transformers' generate applies")
        print(f"for a server: {LOGIT_BIAS_FILE}, its largest entries as logit_bias")
