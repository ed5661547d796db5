"""Finished training runs as tables, their adapters, and tiny runs for the smoke test."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from peft import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.results import read_metrics
from grade.training.config import TrainConfig
from grade.training.run import run_training, write_run
from grade.training.toy import toy_task

TOY_TRAINING = dict(
    max_steps=6, per_device_train_batch_size=8, max_prompt_length=6, truncation="right", raw_prompts=True,
    max_completion_length=8, min_completion_length=2, learning_rate=1e-2, lr_scheduler_type="constant", beta=0.01,
    eval_strategy="steps", eval_steps=2, eval_prompts=32, final_eval_prompts=64, kl_eval_prompts=32, seed=0,
    use_cpu=True,
)  # fmt: skip


def overwrite_adapter(backbone: Backbone, folder: str | Path) -> None:
    """Copy a saved adapter's values into a backbone that has an adapter of the same shape."""
    path = Path(folder) / "adapter_model.safetensors"
    try:
        state = load_file(path)
        result = set_peft_model_state_dict(backbone.peft, state)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError("adapter", str(path), f"a saved adapter that fits this one ({reason})") from None
    if result.unexpected_keys:
        raise InputError("adapter", str(path), f"an adapter without {result.unexpected_keys[0]}")


def toy_runs(folder: str | Path, runs: Sequence[str] = ("ste", "gumbel", "ste_trunk")) -> None:
    """Train the toy task a few steps under each run name, so that the notebook has something to show."""
    for run in runs:
        # The same base as the notebook's own, so that it can load a run's adapter.
        task = toy_task(kind="trunk" if run.endswith("_trunk") else "bag")
        config = TrainConfig(method=run.removesuffix("_trunk"), **TOY_TRAINING)
        result = run_training(config, task)
        write_run(Path(folder) / f"{run}-0", config, task, result)


def run_table(runs_dir: str | Path) -> pd.DataFrame:
    """Finished runs: held-out reward, gold judge and KL before and after training.

    One row per run, with standard errors over prompts (those of a gain are of the paired difference), ``z``, which
    is gain over standard error, and the number of prompts ``n``.
    """
    rows = []
    for folder in _folders(runs_dir):
        m = read_metrics(folder / "metrics.json")
        rows.append({
            "run": folder.name, "samples": m["samples"],
            "reward before": m["before/val/reward_mean"], "reward after": m["after/val/reward_mean"],
            "reward stderr": m["gain/reward_stderr"], "reward z": m["gain/reward"] / m["gain/reward_stderr"],
            "gold before": m["before/val/gold_mean"], "gold after": m["after/val/gold_mean"],
            "gold stderr": m["gain/gold_stderr"], "gold z": m["gain/gold"] / m["gain/gold_stderr"],
            "KL": m["after/val/kl"], "KL stderr": m["after/val/kl_stderr"], "n": m["gain/reward_n"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def curve_table(runs_dir: str | Path) -> pd.DataFrame:
    """Histories of finished runs without their times, one below the other, with a first column ``run``."""
    histories = {folder.name: pd.read_csv(folder / "history.csv") for folder in _folders(runs_dir)}
    table = pd.concat(histories, names=["run"]).reset_index("run").reset_index(drop=True)
    return table.drop(columns=[column for column in table if "seconds" in column])


def seconds_table(runs_dir: str | Path) -> pd.DataFrame:
    """Seconds since the start of finished runs, evaluations not counted: columns run, step and seconds."""
    tables = []
    for folder in _folders(runs_dir):
        file = folder / "timings.csv"
        times = pd.read_csv(file if file.is_file() else folder / "history.csv")
        tables.append(times[["step", "seconds"]].assign(run=folder.name))
    return pd.concat(tables, ignore_index=True)[["run", "step", "seconds"]]


def text_table(runs_dir: str | Path, rows: int = 3) -> pd.DataFrame:
    """Completions before and after training, with the trained reward and the gold judge's score, by run."""
    samples = [
        {"run": folder.name, **sample}
        for folder in _folders(runs_dir)
        for sample in json.loads((folder / "samples.json").read_text(encoding="utf-8"))[:rows]
    ]
    return pd.DataFrame(samples)


def _folders(runs_dir: str | Path) -> list[Path]:
    folders = sorted(file.parent for file in Path(runs_dir).glob("*/history.csv"))
    if not folders:
        raise InputError("runs_dir", str(runs_dir), "a folder with <run>-<seed>/history.csv")
    return folders
