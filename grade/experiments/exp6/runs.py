"""Experiment 6's bookkeeping: the setting its notebook measures on, finished runs, and the headline figures.

The notebook narrates; what it calls and is not a measurement (`grade.experiments.exp6.measure`,
`grade.experiments.exp6.memory`) is here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from accelerate import Accelerator
from peft import set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.results import read_metrics
from grade.training.config import TrainConfig
from grade.training.loop import run_training, write_run
from grade.training.toy import toy_task

TOY_TRAINING = dict(max_steps=6, max_prompt_tokens=6, max_new_tokens=8, min_new_tokens=2, learning_rate=1e-2,
                    kl_coef=0.01, eval_every=2, eval_prompts=32, final_eval_prompts=64, kl_eval_prompts=32)  # fmt: skip


def load_adapter(backbone: Backbone, folder: str | Path) -> None:
    """Copy a saved adapter's values into a backbone that has an adapter of the same shape.

    Args:
        backbone: Its adapter is overwritten.
        folder: A run's ``adapter``.

    Raises:
        InputError: If there is no adapter or it does not fit.
    """
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
    """Train the toy task a few steps under each run name, so that the notebook has something to show.

    Args:
        folder: One folder ``<run>-0`` each is written here.
        runs: Run names; one that ends in ``_trunk`` has the trunk reward.
    """
    for run in runs:
        # The same base as the notebook's own, so that it can load a run's adapter.
        task = toy_task(kind="trunk" if run.endswith("_trunk") else "bag")
        config = TrainConfig(method=run.removesuffix("_trunk"), **TOY_TRAINING)
        result = run_training(config, task, Accelerator(cpu=True), lambda line: None)
        write_run(Path(folder) / f"{run}-0", config, task, result)


def load_histories(runs_dir: str | Path) -> dict[str, pd.DataFrame]:
    """Histories of finished runs, by run name ``<run>-<seed>``.

    Raises:
        InputError: If there are none.
    """
    files = sorted(Path(runs_dir).glob("*/history.csv"))
    if not files:
        raise InputError("runs_dir", str(runs_dir), "a folder with <run>-<seed>/history.csv")
    return {file.parent.name: pd.read_csv(file) for file in files}


def run_table(runs_dir: str | Path) -> pd.DataFrame:
    """One row a finished run: held-out reward, gold judge and KL before and after, with standard errors and n.

    Standard errors are over prompts; those of a gain are of the paired difference. ``z`` is gain over standard error.
    """
    rows = []
    for file in sorted(Path(runs_dir).glob("*/metrics.json")):
        m = read_metrics(file)
        rows.append({
            "run": file.parent.name, "samples": m["samples"], "seconds": m["seconds"],
            "reward before": m["before/val/reward_mean"], "reward after": m["after/val/reward_mean"],
            "reward stderr": m["gain/reward_stderr"], "reward z": m["gain/reward"] / m["gain/reward_stderr"],
            "gold before": m["before/val/gold_mean"], "gold after": m["after/val/gold_mean"],
            "gold stderr": m["gain/gold_stderr"], "gold z": m["gain/gold"] / m["gain/gold_stderr"],
            "KL": m["after/val/kl"], "KL stderr": m["after/val/kl_stderr"], "n": m["gain/reward_n"],
        })  # fmt: skip
    return pd.DataFrame(rows)


def run_figures(runs_dir: str | Path) -> dict[str, float]:
    """Headline figures ``train/<run>/...``: means over seeds of the run table's columns.

    With one seed, standard errors are over prompts. With several, that of the mean of their (nearly independent)
    estimates, and ``seeds_stderr`` is the standard error over seeds.
    """
    table = run_table(runs_dir)
    table["name"] = table["run"].str.rpartition("-")[0]
    figures: dict[str, float] = {}
    for name, rows in table.groupby("name"):
        n = len(rows)
        gain = rows["reward after"] - rows["reward before"]
        figures |= {
            f"train/{name}/val_reward_before": rows["reward before"].mean(),
            f"train/{name}/val_reward_after": rows["reward after"].mean(),
            f"train/{name}/val_reward_stderr": float(np.sqrt((rows["reward stderr"] ** 2).sum()) / n),
            f"train/{name}/gold_before": rows["gold before"].mean(),
            f"train/{name}/gold_after": rows["gold after"].mean(),
            f"train/{name}/gold_stderr": float(np.sqrt((rows["gold stderr"] ** 2).sum()) / n),
            f"train/{name}/kl": rows["KL"].mean(),
            f"train/{name}/samples": int(rows["samples"].iloc[0]),
            f"train/{name}/seconds": rows["seconds"].mean(),
            f"train/{name}/prompts": int(rows["n"].iloc[0]),
            f"train/{name}/seeds": n,
        }
        if n > 1:
            figures[f"train/{name}/seeds_stderr"] = float(gain.std(ddof=1) / np.sqrt(n))
    return figures


def sample_table(runs_dir: str | Path, run: str, rows: int = 4) -> pd.DataFrame:
    """Completions before and after training, with the trained reward and the gold judge's score."""
    samples = json.loads((Path(runs_dir) / run / "samples.json").read_text(encoding="utf-8"))
    return pd.DataFrame(samples[:rows])


def prefixed(prefix: str, figures: Mapping[str, float]) -> dict[str, float]:
    """Figures with ``prefix/`` before each name."""
    return {f"{prefix}/{name}": value for name, value in figures.items()}
