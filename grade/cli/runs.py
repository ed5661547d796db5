"""Commands that look at a run and take its adapter with them; a finished run is shown without loading torch."""

from __future__ import annotations

import argparse
import math
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from grade.cli.options import command, option
from grade.errors import InputError, reading, require_file
from grade.files import check_file, check_whole, checkpoints_of, read_json, write_text
from grade.results import environment

HISTORY_ROWS = 10
EVALUATIONS = 6
"""At most, side by side on a page."""
PART = "rewards/"
HELD_OUT = "held-out reward"
HISTORY = {
    "train/reward": "reward", "train/kl": "KL", "val/reward_mean": HELD_OUT, "val/reward_stderr": "stderr",
    "kl": "KL", "eval_reward": HELD_OUT, "eval_reward_stderr": "stderr",
    "train/distilled/r2": "R2", "distilled/r2": "R2", "train/length": "length", "completions/mean_length": "length",
}  # fmt: skip
"""Columns of ``history.csv`` and names in the Trainer's log, as they are shown."""
PACKAGES = ("grade-rl", "accelerate", "datasets", "trl", "vllm")
WRITTEN = "a file that a training run wrote"


@command(
    "show",
    option("run", metavar="RUN", help="a run's folder, finished or not"),
    option("--step", type=int, metavar="N", help="completions of this step (default: the newest)"),
    option("--rows", type=int, default=5, metavar="N", help="completions of each table (default: 5)"),
    option("--columns", metavar="NAME,NAME", help="default: prompt, completion, reward and its parts"),
    option("--html", metavar="FILE", help="write a page with curves and completions by step instead"),
)
def _show(args: argparse.Namespace) -> None:
    """Print a run: its settings, its history, some of its completions with their rewards."""
    if args.rows < 1:
        raise InputError("--rows", args.rows, "at least 1")
    run = Path(args.run)
    checkpoints = [path for path in checkpoints_of(run) if any(path.iterdir())]
    files = ("metrics.json", "history.csv", "run.json", "completions")
    if not checkpoints and not any((run / name).exists() for name in files):
        raise InputError("RUN", str(run), "the folder of a training run")
    about, metrics = _read_json(run / "run.json"), _read_json(run / "metrics.json")
    newest = checkpoints[-1] if checkpoints else run
    state, ours = (_read_json(newest / name) for name in ("trainer_state.json", "grade_state.json"))
    mark = about.get("mark")
    if ours.get("run", mark) != mark:
        raise InputError("RUN", str(newest), "a checkpoint of this run: it is another's")
    # The note says so itself; an earlier run's results may still be beside it.
    finished = bool(metrics) and bool(about.get("finished", not about))
    if args.html is not None:
        check_file(args.html, "--html", ".html")
    paths = _table_paths(run)
    step = max(paths, default=None) if args.step is None else args.step
    if step is not None and step not in paths:
        allowed = ", ".join(map(str, sorted(paths))) or "none yet"
        raise InputError("--step", step, f"a step with completions: {allowed}")
    tables = {kind: _table(path, mark) for kind, path in paths.get(step, {}).items()}
    liked = tables.pop("tokens", None)
    shown = _chosen(tables, args.columns)
    with reading("RUN", run, "the folder of a training run"):
        known = about.get("settings") or ours.get("settings", {})  # the latter of a run from Python
        settings = _settings(known, metrics if finished else {}, state)
    with reading("RUN", run / "history.csv" if finished else newest / "trainer_state.json", WRITTEN):
        log = _log(run, state, finished)
        history = _history(log) if len(log) else log
    tokens = [] if liked is None else _liked(run, liked, args.rows)
    if args.html is not None:
        from grade.cli.page import page  # here: matplotlib takes a second

        evaluated = _spaced(sorted(step for step, kinds in paths.items() if "eval" in kinds), EVALUATIONS)
        evaluations = {step: _table(paths[step]["eval"], mark) for step in evaluated}
        if tables and not evaluations:
            evaluations = {step: tables[max(tables)]}
        versions = _read_json(run / "timings.json").get("environment", {}) if finished else {}
        with reading("RUN", run, "the folder of a training run"):
            title, command = run.resolve().name, str(about.get("command", ""))
            html = page(title, settings, log, evaluations, tokens, known, command, versions, args.rows, _shown)
        write_text(args.html, html)
        print(f"wrote {args.html}")
        return
    console = Console(markup=False, highlight=False, emoji=False)
    console.width = min(max(console.width, 40), 1000)  # COLUMNS may be anything
    console.print(settings, soft_wrap=True)
    if len(history):
        console.print("", rich_table(history), sep="\n")
    for kind, table in shown.items():
        console.print(f"\n{_shown(kind)}, step {step}: {min(args.rows, len(table))} of {len(table)} completions")
        console.print(rich_table(table.head(args.rows)))
    if tokens:
        best, worst = (", ".join(words) or "nothing yet" for words in tokens)
        console.print(f"\nthe reward likes: {best}\ndislikes: {worst}", soft_wrap=True)
    if not shown:
        console.print("\nno completions yet: they are kept with log_completions=true, and by every evaluation")


@command(
    "merge",
    option("run", metavar="RUN", help="folder of a finished run, of an adapter or of a checkpoint"),
    option("out", metavar="OUT", help="folder of the model; must not exist, or be empty"),
    option("--dtype", metavar="TYPE",
           help="of the weights (default: the base's); bfloat16 loses part of the adapter"),
)  # fmt: skip
def _merge(args: argparse.Namespace) -> None:
    """Write a plain transformers folder."""
    from grade.training.merge import merge  # here: `show` needs no torch

    dtype = merge(args.run, args.out, args.dtype)
    print(f"wrote {args.out} ({str(dtype).removeprefix('torch.')})")


@command("env")
def _env(args: argparse.Namespace) -> None:
    """Print what a number depends on besides code and parameters."""
    installed = {found.name: found.version for found in distributions() if found.name in PACKAGES}
    for name, value in {"platform": platform.platform(), **environment(), **installed}.items():
        print(f"{name}: {value}")


def _settings(settings: dict[str, Any], metrics: dict[str, Any], state: dict[str, Any]) -> str:
    """One line: method, base, rewards, steps, seed; what is not known is left out. Without metrics it is unfinished."""
    known = {**metrics, **settings}
    rewards = known.get("reward", [])
    total = int(known.get("steps") or state.get("max_steps") or settings.get("max_steps", -1))
    step = int(state.get("global_step", 0))
    finished = metrics or 0 < total <= step  # without metrics: trained from Python
    steps = f"{total} steps" if finished else f"step {step} of {total}, not finished"
    parts = {
        "": known.get("method"), "base ": known.get("model"),
        "reward ": " + ".join([rewards] if isinstance(rewards, str) else rewards),
        " ": steps if total > 0 else "" if finished else "not finished", "seed ": known.get("seed"),
    }  # fmt: skip
    return ", ".join(f"{name.lstrip()}{_shown(value)}" for name, value in parts.items() if value not in (None, ""))


def _liked(run: Path, table: pd.DataFrame, most: int) -> list[list[str]]:
    """Tokens that the reward likes most and least, each with its value."""
    with reading("RUN", run, "a table of tokens that a training run wrote"):
        pairs = zip(table["token"], table["value"], strict=True)
        listed = [f"{_shown(repr(token))} {value:+.2g}" for token, value in pairs]
    return [listed[:most], listed[::-1][:most]]


def _log(run: Path, state: dict[str, Any], finished: bool) -> pd.DataFrame:
    """All rows of the history, with the names of `HISTORY`."""
    check_whole(run, "RUN", ("history.csv",))
    if finished and (run / "history.csv").exists():
        rows = pd.read_csv(require_file(run / "history.csv")).astype({"step": int})
        if rows.empty:
            raise ValueError("it has no rows")
    elif state:
        rows = pd.DataFrame([*state["log_history"]], columns=["step", "reward", *HISTORY]).groupby("step").first()
        rows = rows.dropna(how="all").dropna(axis=1, how="all").reset_index()
    else:
        return pd.DataFrame()
    names = list(dict.fromkeys(["step", "reward", *HISTORY.values()]))
    return rows.rename(columns=HISTORY).reindex(columns=names).astype(float)


def _history(rows: pd.DataFrame) -> pd.DataFrame:
    """Some rows of the history: those with an evaluation, or evenly spaced ones, always with the last."""
    rows = rows[["step", "reward", "KL", HELD_OUT, "stderr"]]
    evaluated = rows.index[rows[HELD_OUT].notna()]
    kept = evaluated.union(rows.index[-1:]) if len(evaluated) > 2 else rows.index
    rows = rows.loc[_spaced(kept, HISTORY_ROWS)].astype({"step": int})
    errors = rows.pop("stderr").map(lambda v: "" if pd.isna(v) else f" ± {v:.2g}")
    rows[HELD_OUT] = rows[HELD_OUT].map(_shown) + errors
    return rows if len(evaluated) else rows.drop(columns=HELD_OUT)


def _spaced(values: Sequence[int], most: int) -> list[int]:
    """Some of the values: evenly spaced, with the first and the last."""
    return [values[i] for i in np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)]


def _table_paths(run: Path) -> dict[int, dict[str, Path]]:
    """Tables of completions by step and kind."""
    folder = run / "completions"
    check_whole(run, "RUN", ("completions/*",))
    with reading("RUN", folder, "a folder that a training run wrote"):
        names = sorted(os.listdir(folder)) if os.path.lexists(folder) else []
    paths: dict[int, dict[str, Path]] = {}
    for name in names:
        if match := re.fullmatch(r"([^.].*)_(\d+)\.parquet", name):
            paths.setdefault(int(match[2]), {})[match[1]] = folder / name
    return paths


def _table(path: Path, mark: str | None) -> pd.DataFrame:
    """A table of completions or tokens; each reward's part has the reward's own name unless a column has it."""
    with reading("RUN", path, "a table that a training run wrote"):
        table = pd.read_parquet(require_file(path), page_checksum_verification=True)
        if (written := f"{path.stem} of {mark}") != table.attrs.get("table", written):
            raise InputError("RUN", str(path), "a table of this run and step: it is another's")
        of_tokens = path.stem.startswith("tokens_")
        texts, number = (["token"], "value") if of_tokens else (["prompt", "completion"], "reward")
        names = {name: name.removeprefix(PART) for name in table if name.startswith(PART)}
        table = table.astype(dict.fromkeys((number, *names), float))
        if not table[texts].map(lambda text: isinstance(text, str)).all(None):
            raise ValueError(f"{' and '.join(texts)} are not texts")
        names = {name: name if part in table else part for name, part in names.items()}
        table = table.rename(columns=names)
        table.attrs["names"] = names
    return table


def _chosen(tables: dict[str, pd.DataFrame], columns: str | None) -> dict[str, pd.DataFrame]:
    """Tables with the columns to show, without tables that have none of them."""
    wanted = [] if columns is None else [name.strip() for name in columns.split(",")]
    known = list(dict.fromkeys(column for table in tables.values() for column in (*table, *table.attrs["names"])))
    for name in wanted:
        if tables and name not in known:
            raise InputError("--columns", name, f"names of columns: {', '.join(known)}")
    chosen = {}
    for kind, table in tables.items():
        parts = table.attrs["names"]
        usual = ["prompt", "completion", "reward", *(parts if len(parts) > 1 else [])]  # a single part is the reward
        present = [parts.get(name, name) for name in wanted or usual if name in table or name in parts]
        chosen |= {kind: table[present]} if present else {}
    return chosen


def rich_table(table: pd.DataFrame) -> Table:
    """Numbers with four digits; texts share what is left of the width, shortened where they are longer."""
    texts = [name for name in table if not pd.api.types.is_numeric_dtype(table[name]) and name != HELD_OUT]
    rich = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=bool(texts), header_style="")
    for name in table:
        style = dict(overflow="ellipsis", ratio=1) if name in texts else dict(justify="right")
        rich.add_column(name, no_wrap=True, **style)
    for row in table.itertuples(index=False):
        rich.add_row(*map(_shown, row))
    return rich


def _shown(value: Any, kept: str = "") -> str:
    """A number with four digits, or a text on one line, without what a terminal would obey, except what is kept."""
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4g}"
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in str(value))


def _read_json(path: Path) -> dict[str, Any]:
    """A file's content, or nothing where there is no file."""
    check_whole(path.parent, "RUN", (path.name,))
    if not path.exists():
        return {}
    with reading("RUN", path, WRITTEN):
        return {**read_json(path)}
