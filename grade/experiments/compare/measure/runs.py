"""Training runs that differ in nothing but their method: the same model, reward, prompts and number of completions.

Completions have a fixed length T: KL is measured per token (a mean over the completion's tokens), and only then is T
times that the KL of a completion. One learning rate for each method, from one grid.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from grade.errors import InputError
from grade.experiments.training_runs import SETTINGS, Bench, Run, train_all
from grade.training.load import Task
from grade.training.run import RunResult, evaluate_task

CURVES = ("method", "beta", "seed", "step", "samples", "reward", "gold", "kl")
"""Columns of the evaluations along training; KL in nats per completion."""
FINALS = (*CURVES, "gain", "gold_gain")
"""Columns of the ends of runs; gains are over the untrained policy."""
SEARCHED = ("method", "learning_rate", "reward", "kl", "objective")
"""Columns of what a search tried; ``objective`` is reward minus beta times KL per token."""


@dataclass(frozen=True)
class Comparison(Bench):
    """Runs of which more is known at the end."""

    def ended(self, run: Run, task: Task, result: RunResult) -> dict[str, Any]:
        """Figures of more prompts, and gains over the untrained policy."""
        config, after, before = run.config, result.after, result.before
        return {
            "reward": float(after.reward.mean()),
            "gold": float(after.gold.mean()),
            "kl": float(after.kl.mean()) * config.max_completion_length,
            "gain": float((after.reward - before.reward).mean()),
            "gold_gain": float((after.gold - before.gold).mean()),
        }


def make_run(
    method: str, beta: float, seed: int, learning_rate: float, values: Mapping[str, Any], reward: str = ""
) -> Run:  # fmt: skip
    """A run of the comparison; ``per_device_train_batch_size`` of the shared values is completions a step."""
    names = {"method": method, "beta": beta, "seed": seed}
    own = {**values, **SETTINGS.get(method, {}), **names, "learning_rate": learning_rate}
    completions = values["per_device_train_batch_size"]
    if method == "remax":  # a greedy completion for every sampled one
        own["per_device_train_batch_size"] = completions // 2
    run = Run(names, own, reward=reward)
    if run.config.batch_completions != completions:
        allowed = f"a number that gives {method} as many completions as the others"
        raise InputError("per_device_train_batch_size", completions, allowed)
    return run


def untrained(bench: Bench, run: Run) -> dict[str, float]:
    """Figures of the policy before any training, on the prompts of the final evaluation; gold only with a judge."""
    config, task = run.config, bench.task(run)
    start = evaluate_task(config, task, config.final_eval_prompts)
    figures = {"reward": float(start.reward.mean()), "gold": float(start.gold.mean())}
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def search(bench: Bench, runs: Sequence[Run], processes: int = 1) -> tuple[dict[str, float], pd.DataFrame]:
    """Each method's learning rate, the best objective on held-out training prompts, and what was tried, `SEARCHED`.

    With one run for each method, nothing is trained.
    """
    rates = {run.names["method"]: run.values["learning_rate"] for run in runs}
    if len(rates) == len(runs):
        return rates, pd.DataFrame(columns=list(SEARCHED))
    _, finals = train_all(replace(bench, on_search_prompts=True), runs, processes)
    table = finals[["method", "reward", "kl"]].assign(learning_rate=[run.values["learning_rate"] for run in runs])
    table["objective"] = table["reward"] - finals["beta"] * table["kl"] / runs[0].values["max_completion_length"]
    best = table.loc[table.groupby("method", sort=False)["objective"].idxmax()]
    return dict(zip(best["method"], best["learning_rate"], strict=True)), table[list(SEARCHED)]
