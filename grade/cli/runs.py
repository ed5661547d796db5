"""Commands that look at a run and take its adapter with them.

The heavy imports are inside: a finished run is shown without loading torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grade.errors import InputError, require_file

HISTORY_ROWS = 10
TEXT_WIDTH = 20
"""Columns of the terminal that a text has at least; a table that is wider goes on below itself."""
PART = "rewards/"
HISTORY = {"step": "step", "train/reward": "reward", "train/kl": "KL", "val/reward_mean": "held-out reward"}


def add_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's folder, finished or not")
    parser.add_argument("--step", type=int, metavar="N", help="completions of this step (default: the newest)")
    parser.add_argument("--rows", type=int, default=5, metavar="N", help="completions of each table (default: 5)")
    parser.add_argument("--columns", metavar="NAME,NAME", help="default: prompt, completion, reward and its parts")


def run_show(args: argparse.Namespace) -> None:
    """Print a run: its settings, its history, some of its completions with their rewards."""
    if args.rows < 1:
        raise InputError("--rows", args.rows, "at least 1")
    run, width = Path(args.run), shutil.get_terminal_size().columns
    state = _state(run)
    history = _history(run, state)
    tables = _tables(run, args.step)
    liked = [tables.pop(title) for title in list(tables) if title.startswith("tokens, ")]
    shown = _chosen(tables, args.columns)
    print(_settings(run, state))
    if len(history):
        print(f"\n{_text(history, width)}")
    for name, table in shown.items():
        print(f"\n{name}: {min(args.rows, len(table))} of {len(table)} completions")
        texts = [column for column in table if not pd.api.types.is_numeric_dtype(table[column])]
        print(_text(table.head(args.rows), width, texts))
    for path in liked:
        print(f"\n{_liked_tokens(_table(path), args.rows)}")
    if not shown:
        print("\nno completions yet: they are kept with log_completions=true, and by every evaluation")


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a finished run, of an adapter or of a checkpoint")
    parser.add_argument("out", metavar="OUT", help="folder of the model; must not exist, or be empty")
    parser.add_argument("--dtype", metavar="TYPE",
                        help="of the weights (default: the base's); bfloat16 loses part of the adapter")  # fmt: skip


def run_merge(args: argparse.Namespace) -> None:
    """Write a plain transformers folder."""
    from grade.training.merge import merge

    dtype = merge(args.run, args.out, args.dtype)
    print(f"wrote {args.out} ({str(dtype).removeprefix('torch.')})")


def _state(run: Path) -> dict[str, Any] | None:
    """The Trainer's state in the newest checkpoint, if there is one."""
    checkpoints = [p for p in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    newest = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    files = ("metrics.json", "history.csv", "run.json", "completions")
    if newest is None and not any((run / name).exists() for name in files):
        raise InputError("RUN", str(run), "the folder of a training run")
    return None if newest is None else _read_json(newest / "trainer_state.json")


def _settings(run: Path, state: dict[str, Any] | None) -> str:
    """One line: method, base, rewards, steps, seed; what is not known is left out."""
    settings = _read_json(run / "run.json").get("settings", {}) if _is_there(run / "run.json") else {}
    if not isinstance(settings, dict):
        raise InputError("RUN", str(run / "run.json"), "a file that a training run wrote")
    metrics = _read_json(run / "metrics.json") if _finished(run) else {}
    known = metrics | settings
    rewards = known.get("reward", [])
    total = metrics.get("steps") or (state or {}).get("max_steps") or settings.get("max_steps", -1)
    steps = f"{total} steps" if total > 0 else ""
    if not _finished(run):
        done = state["global_step"] if state else 0
        steps = f"step {done} of {total}, not finished" if total > 0 else "not finished"
    parts = {
        "": known.get("method"), "base ": known.get("model"),
        "reward ": " + ".join([rewards] if isinstance(rewards, str) else rewards), " ": steps,
        "seed ": known.get("seed"),
    }  # fmt: skip
    return ", ".join(f"{name.lstrip()}{value}" for name, value in parts.items() if value not in (None, ""))


def _finished(run: Path) -> bool:
    about = run / "run.json"  # says so itself; an earlier run's results may still be beside it
    return _is_there(run / "metrics.json") and (not _is_there(about) or bool(_read_json(about).get("finished")))


def _is_there(path: Path) -> bool:
    """Whether there is anything; what is no file is refused when it is read."""
    return os.path.lexists(path)


def _history(run: Path, state: dict[str, Any] | None) -> pd.DataFrame:
    """Some rows of the history: those with an evaluation, or evenly spaced ones, always with the last."""
    rows = _history_rows(run, state)
    if not len(rows):
        return rows
    evaluated = rows.index[rows["val/reward_mean"].notna()]
    kept = evaluated.union(rows.index[-1:]) if len(evaluated) > 2 else rows.index
    places = np.linspace(0, len(kept) - 1, min(HISTORY_ROWS, len(kept))).round().astype(int)
    rows = rows.loc[kept[places]]
    table = rows[list(HISTORY)].rename(columns=HISTORY)
    table["step"] = [str(int(step)) for step in rows["step"]]
    table["held-out reward"] = [
        _number(mean) + ("" if pd.isna(stderr) else f" ± {stderr:.2g}")
        for mean, stderr in zip(rows["val/reward_mean"], rows["val/reward_stderr"], strict=True)
    ]
    return table if len(evaluated) else table.drop(columns="held-out reward")


def _history_rows(run: Path, state: dict[str, Any] | None) -> pd.DataFrame:
    try:
        if _finished(run) and _is_there(run / "history.csv"):
            rows = pd.read_csv(require_file(run / "history.csv"))
        elif state is not None:
            from grade.training.logs import history_rows

            rows = pd.DataFrame(history_rows(state["log_history"]))
        else:
            return pd.DataFrame()
        return rows.reindex(columns=[*HISTORY, "val/reward_stderr"]).astype(float)
    except InputError:
        raise
    except (OSError, ValueError, KeyError):
        raise InputError("RUN", str(run), "the folder of a training run whose history can be read") from None


def _tables(run: Path, step: int | None) -> dict[str, Path]:
    """Tables of completions of a step: of training and of evaluations."""
    found: dict[int, dict[str, Path]] = {}
    for path in sorted((run / "completions").glob("*.parquet")):
        if match := re.fullmatch(r"(.+)_(\d+)", path.stem):
            found.setdefault(int(match[2]), {})[f"{match[1]}, step {int(match[2])}"] = path
    if step is None:
        return found[max(found)] if found else {}
    if step not in found:
        steps = ", ".join(map(str, sorted(found))) or "none yet"
        raise InputError("--step", step, f"a step with completions: {steps}")
    return found[step]


def _chosen(paths: dict[str, Path], columns: str | None) -> dict[str, pd.DataFrame]:
    """Tables with the columns to show, without tables that have none of them."""
    tables = {title: _table(path) for title, path in paths.items()}
    if columns is None:
        return {title: table[_default_columns(table)] for title, table in tables.items()}
    present: dict[str, list[str]] = {title: [] for title in tables}
    for name in (name.strip() for name in columns.split(",")):
        for title, table in tables.items():
            present[title] += [column for column in (name, name.removeprefix(PART)) if column in table][:1]
        if tables and not any(name in (column, PART + column) for have in present.values() for column in have):
            known = dict.fromkeys(column for table in tables.values() for column in table)
            raise InputError("--columns", name, f"names of columns: {', '.join(known)}")
    return {title: tables[title][have] for title, have in present.items() if have}


def _liked_tokens(table: pd.DataFrame, rows: int) -> str:
    """What the distilled reward likes most and least: tokens, and what one of them changes the reward by."""
    try:
        pairs = zip(table["token"], table["value"], strict=True)
        listed = [f"{_plain(repr(token))} {value:+.2g}" for token, value in pairs]
    except (KeyError, TypeError, ValueError):
        raise InputError("RUN", "tokens", "a table of tokens that a training run wrote") from None
    if not listed:
        return "the reward likes no token yet: nothing is fitted"
    return f"the reward likes: {', '.join(listed[:rows])}\ndislikes: {', '.join(listed[::-1][:rows])}"


def _table(path: Path) -> pd.DataFrame:
    """Completions, each reward's part under the reward's own name unless a column has that."""
    try:
        table = pd.read_parquet(require_file(path))
    except (OSError, ValueError):
        raise InputError("RUN", str(path), "a table that a training run wrote") from None
    parts = {name: name.removeprefix(PART) for name in table if name.startswith(PART)}
    parts = {name: name if part in table else part for name, part in parts.items()}
    table = table.rename(columns=parts)
    table.attrs["parts"] = list(parts.values())
    return table


def _default_columns(table: pd.DataFrame) -> list[str]:
    parts = table.attrs["parts"]  # a single one is the reward
    return ["prompt", "completion", "reward", *(parts if len(parts) > 1 else [])]


def _text(table: pd.DataFrame, width: int, texts: Sequence[str] = ()) -> str:
    """A table in a terminal's width: numbers with four digits, texts to the left and shortened where they are long."""
    cells = {name: [v if isinstance(v, str) else _number(v) for v in table[name]] for name in table}
    cells |= {name: [_plain(v) for v in table[name]] for name in texts}
    widths = {name: max(map(_width, [name, *values])) for name, values in cells.items()}
    long = [name for name in texts if widths[name] > TEXT_WIDTH]
    # pandas begins a new block of columns where two places are not left.
    left = width - 2 - sum(widths[name] + 1 for name in cells if name not in long)
    room = {name: max(TEXT_WIDTH, left // len(long) - 1) for name in long}
    # The header too, or pandas would put it to the right.
    fitted = {_fit(name, room.get(name, widths[name])) if name in texts else name:
              [_fit(v, room.get(name, widths[name])) for v in values] if name in texts else values
              for name, values in cells.items()}  # fmt: skip
    with pd.option_context("display.unicode.east_asian_width", True):
        text = pd.DataFrame(fitted).to_string(index=False, line_width=width)
    return "\n".join(map(str.rstrip, text.splitlines()))


def _number(value: Any) -> str:
    return "" if pd.isna(value) else f"{value:.4g}"


def _plain(value: Any) -> str:
    """A text on one line, without what a terminal would obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value))


def _fit(text: str, room: int) -> str:
    """A text, shortened or filled up to a width."""
    if _width(text) > room:
        while _width(text) > room - 1:
            text = text[:-1]
        text += "…"
    return text + " " * (room - _width(text))


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(require_file(path).read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    except (OSError, ValueError, RecursionError):
        pass
    raise InputError("RUN", str(path), "a file that a training run wrote")
