"""Commands that look at a run and take its adapter with them; a finished run is shown without loading torch."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from grade.errors import InputError, reading, require_file

HISTORY_ROWS = 10
PART = "rewards/"
HELD_OUT = "held-out reward"
HISTORY = {
    "train/reward": "reward", "train/kl": "KL", "val/reward_mean": HELD_OUT, "val/reward_stderr": "stderr",
    "kl": "KL", "eval_reward": HELD_OUT, "eval_reward_stderr": "stderr",
}  # fmt: skip
"""Columns of ``history.csv`` and names in the Trainer's log, as they are shown."""
WRITTEN = "a file that a training run wrote"


def add_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, finished or not")
    parser.add_argument("--step", type=int, metavar="N", help="completions of this step (default: the newest)")
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="completions of each table (default: 5)")
    parser.add_argument("--columns", metavar="NAME,NAME", help="default: prompt, completion, reward and its parts")
    parser.set_defaults(execute=_show)


def _show(args: argparse.Namespace) -> None:
    """Print a run: its settings, its history, some of its completions with their rewards."""
    if args.rows < 1:
        raise InputError("--rows", args.rows, "at least 1")
    run = Path(args.run)
    checkpoints = [path.parent for path in run.glob("checkpoint-[0-9]*/trainer_state.json")]
    newest = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    files = ("metrics.json", "history.csv", "run.json", "completions")
    if newest is None and not any((run / name).exists() for name in files):
        raise InputError("RUN", str(run), "the folder of a training run")
    about, metrics = _read_json(run / "run.json"), _read_json(run / "metrics.json")
    state = {} if newest is None else _read_json(newest / "trainer_state.json")
    # The note says so itself; an earlier run's results may still be beside it.
    finished = bool(metrics) and bool(about.get("finished", not about))
    tables = {title: _table(path) for title, path in _tables(run, args.step).items()}
    liked = {title: tables.pop(title) for title in list(tables) if title.startswith("tokens, ")}
    shown = _chosen(tables, args.columns)
    with reading("RUN", run, "the folder of a training run"):
        settings = _settings(about.get("settings", {}), metrics if finished else None, state)
        history = _history(run, state, finished)
    console = Console(markup=False, highlight=False, emoji=False, soft_wrap=False)
    console.print(settings, soft_wrap=True)
    if len(history):
        console.print("", _rich(history), sep="\n")
    for title, table in shown.items():
        console.print(f"\n{title}: {min(args.rows, len(table))} of {len(table)} completions")
        console.print(_rich(table.head(args.rows)))
    for table in liked.values():
        with reading("RUN", run, "a table of tokens that a training run wrote"):
            console.print(f"\n{_liked_tokens(table, args.rows)}", soft_wrap=True)
    if not shown:
        console.print("\nno completions yet: they are kept with log_completions=true, and by every evaluation")


def add_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished run, of an adapter or of a checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder of the model; must not exist, or be empty")
    parser.add_argument("--dtype", metavar="TYPE",
                        help="of the weights (default: the base's); bfloat16 loses part of the adapter")  # fmt: skip
    parser.set_defaults(execute=_merge)


def _merge(args: argparse.Namespace) -> None:
    """Write a plain transformers folder."""
    from grade.training.merge import merge  # here: `show` needs no torch

    dtype = merge(args.run, args.out, args.dtype)
    print(f"wrote {args.out} ({str(dtype).removeprefix('torch.')})")


def _settings(settings: dict[str, Any], metrics: dict[str, Any] | None, state: dict[str, Any]) -> str:
    """One line: method, base, rewards, steps, seed; what is not known is left out."""
    known = {**(metrics or {}), **settings}
    rewards = known.get("reward", [])
    total = known.get("steps") or state.get("max_steps") or settings.get("max_steps", -1)
    steps = f"{total} steps" if total > 0 else ""
    if metrics is None:
        steps = f"step {state.get('global_step', 0)} of {total}, not finished" if total > 0 else "not finished"
    parts = {
        "": known.get("method"), "base ": known.get("model"),
        "reward ": " + ".join([rewards] if isinstance(rewards, str) else rewards), " ": steps,
        "seed ": known.get("seed"),
    }  # fmt: skip
    return ", ".join(f"{name.lstrip()}{value}" for name, value in parts.items() if value not in (None, ""))


def _history(run: Path, state: dict[str, Any], finished: bool) -> pd.DataFrame:
    """Some rows of the history: those with an evaluation, or evenly spaced ones, always with the last."""
    if finished and (run / "history.csv").exists():
        rows = pd.read_csv(require_file(run / "history.csv"))
    elif state:
        rows = pd.DataFrame(state["log_history"], columns=["step", "reward", *HISTORY]).groupby("step").first()
        rows = rows.dropna(how="all").dropna(axis=1, how="all").reset_index()
    else:
        return pd.DataFrame()
    rows = rows.rename(columns=HISTORY).reindex(columns=["step", "reward", "KL", HELD_OUT, "stderr"]).astype(float)
    evaluated = rows.index[rows[HELD_OUT].notna()]
    kept = evaluated.union(rows.index[-1:]) if len(evaluated) > 2 else rows.index
    places = np.linspace(0, len(kept) - 1, min(HISTORY_ROWS, len(kept))).round().astype(int)
    rows = rows.loc[kept[places]]
    rows["step"] = rows["step"].astype(int)
    errors = rows.pop("stderr").map(lambda v: "" if pd.isna(v) else f" ± {v:.2g}")
    rows[HELD_OUT] = rows[HELD_OUT].map(_number) + errors
    return rows if len(evaluated) else rows.drop(columns=HELD_OUT)


def _tables(run: Path, step: int | None) -> dict[str, Path]:
    """Tables of completions of a step: of training and of evaluations."""
    steps: dict[int, dict[str, Path]] = {}
    for path in sorted((run / "completions").glob("*.parquet")):
        if match := re.fullmatch(r"([^.].*)_(\d+)", path.stem):
            steps.setdefault(int(match[2]), {})[f"{match[1]}, step {int(match[2])}"] = path
    if step is None:
        return steps[max(steps)] if steps else {}
    if step not in steps:
        allowed = ", ".join(map(str, sorted(steps))) or "none yet"
        raise InputError("--step", step, f"a step with completions: {allowed}")
    return steps[step]


def _table(path: Path) -> pd.DataFrame:
    """Completions, each reward's part under the reward's own name unless a column has that."""
    with reading("RUN", path, "a table that a training run wrote"):
        table = pd.read_parquet(require_file(path))
    parts = {name: name.removeprefix(PART) for name in table if name.startswith(PART)}
    parts = {name: name if part in table else part for name, part in parts.items()}
    table = table.rename(columns=parts)
    table.attrs["parts"] = list(parts.values())
    return table


def _chosen(tables: dict[str, pd.DataFrame], columns: str | None) -> dict[str, pd.DataFrame]:
    """Tables with the columns to show, without tables that have none of them."""
    if columns is None:  # a single part is the reward
        return {title: table[["prompt", "completion", "reward", *(parts if len(parts) > 1 else [])]]
                for title, table in tables.items() for parts in [table.attrs["parts"]]}  # fmt: skip
    present: dict[str, list[str]] = {title: [] for title in tables}
    for name in (name.strip() for name in columns.split(",")):
        matches = {title: column for title, table in tables.items() for column in (name.removeprefix(PART), name)
                   if column in table}  # fmt: skip
        if tables and not matches:
            known = dict.fromkeys(column for table in tables.values() for column in table)
            raise InputError("--columns", name, f"names of columns: {', '.join(known)}")
        for title, column in matches.items():
            present[title].append(column)
    return {title: tables[title][chosen] for title, chosen in present.items() if chosen}


def _liked_tokens(table: pd.DataFrame, rows: int) -> str:
    """What the distilled reward likes most and least: tokens, and what one of them changes the reward by."""
    pairs = zip(table["token"], table["value"], strict=True)
    listed = [f"{_plain(repr(token))} {value:+.2g}" for token, value in pairs]
    if not listed:
        return "the reward likes no token yet: nothing is fitted"
    return f"the reward likes: {', '.join(listed[:rows])}\ndislikes: {', '.join(listed[::-1][:rows])}"


def _rich(table: pd.DataFrame) -> Table:
    """Numbers with four digits; texts share what is left of the width, shortened where they are longer."""
    texts = [name for name in table if not pd.api.types.is_numeric_dtype(table[name]) and name != HELD_OUT]
    rich = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=bool(texts), header_style="")
    for name in table:
        if name in texts:
            rich.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            rich.add_column(name, no_wrap=True, justify="right")
    for row in table.itertuples(index=False):
        rich.add_row(*(_plain(value) if name in texts or isinstance(value, str) else _number(value)
                       for name, value in zip(table, row, strict=True)))  # fmt: skip
    return rich


def _number(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:.4g}"


def _plain(value: Any) -> str:
    """A text on one line, without what a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def _read_json(path: Path) -> dict[str, Any]:
    """A file's content, or nothing where there is no file."""
    if not path.exists():
        return {}
    with reading("RUN", path, WRITTEN):
        return {**json.loads(require_file(path).read_text(encoding="utf-8"))}
