"""Every method on one language model, over weights of KL and seeds: `grade.training.run.run_training`, many times.

All runs share base, reward, judge, prompts and evaluation. A seed decides the adapter, the order of the prompts and the
noise. Every method gets the same number of completions a step (remax's greedy ones count, so it has half as many
prompts), the same number of steps, and the same rule for its settings: a learning rate from one grid, by the held-out
objective on training-like prompts with a seed that the comparison does not use (`search`). What else differs is listed
in `SETTINGS`.

Completions have a fixed length T (``min_completion_length = max_completion_length``), so that KL a completion is T
times KL a token and no method gains by stopping early.

Left out: statistics (`grade.experiments.compare.frontier`, `grade.experiments.compare.metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from grade.errors import InputError
from grade.experiments.compare.measure.text_quality import distinct_n, perplexity, reference_nats
from grade.experiments.measured import progress
from grade.experiments.training_runs import SETTINGS, evaluations, in_workers, review_prompts
from grade.gradients.methods import METHODS
from grade.models.backbone import Backbone
from grade.rewards.gold import GoldJudge
from grade.rewards.model import load_reward
from grade.training.config import TrainConfig
from grade.training.load import Task
from grade.training.run import evaluate_task, run_training
from grade.training.toy import toy_task

CURVES = ("method", "beta", "seed", "step", "samples", "seconds", "reward", "gold", "kl")
"""Columns of the evaluations along training; KL in nats a completion, seconds of training alone."""
FINALS = (*CURVES, "gain", "gold_gain", "perplexity", "distinct1", "distinct2")
"""Columns of the ends of runs; gains are over the untrained policy."""

SEARCHED = ("method", "learning_rate", "reward", "kl", "objective")
"""Columns of what a search tried; KL in nats a completion."""


@dataclass(frozen=True)
class Shared:
    """Models, prompts and settings shared by all runs; sent to each worker process once.

    Attributes:
        backbone_dir: Folder of the base; empty: the toy task, whatever else is named.
        reward_dir: Folder of the reward model.
        gold: File of the gold judge, or empty.
        reviews_dir: Folder of the review splits.
        values: Fields of `TrainConfig`.
        on_search_prompts: Evaluate on the held-out training prompts instead of the validation split.
    """

    backbone_dir: str
    reward_dir: str
    gold: str
    reviews_dir: str
    values: Mapping[str, Any]
    on_search_prompts: bool = False

    @cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """Prompts of training and of evaluation."""
        return review_prompts(self.reviews_dir, self.on_search_prompts)

    @cached_property
    def judge(self) -> GoldJudge | None:
        """The gold judge."""
        return GoldJudge.load(self.gold) if self.gold else None

    def task(self, seed: int) -> Task:
        """The task with a fresh adapter."""
        if not self.backbone_dir:
            task = toy_task()
            held_out = task.train_prompts[-50:] if self.on_search_prompts else task.validation_prompts
            return replace(task, train_prompts=task.train_prompts[:-50], validation_prompts=held_out)
        lora = TrainConfig(method="ste", **_common(self.values)).lora
        backbone = Backbone.load(self.backbone_dir, lora=lora, seed=seed)
        return Task(backbone, self.reward(backbone), self.judge, *self.texts)

    def reward(self, backbone: Backbone) -> Any:
        """The reward that training sees."""
        return load_reward(self.reward_dir, backbone)


@dataclass(frozen=True)
class Run:
    """One training run of the comparison."""

    method: str
    beta: float
    seed: int
    learning_rate: float


def run_config(run: Run, values: Mapping[str, Any]) -> TrainConfig:
    """The run's settings: the shared values, the method's own, and the same number of completions for all.

    Args:
        run: Method, weight of KL, seed, learning rate.
        values: Fields of `TrainConfig`; ``per_device_train_batch_size`` is completions a step. Those of other
            methods are left out.

    Returns:
        The config.

    Raises:
        InputError: For an unknown method, settings that do not fit, or completions of varying length.
    """
    if run.method not in METHODS:
        raise InputError("method", run.method, f"one of {', '.join(METHODS)}")
    own = dict(values) | SETTINGS.get(run.method, {})
    own |= {"beta": run.beta, "seed": run.seed, "learning_rate": run.learning_rate}
    if run.method == "remax":  # a greedy completion for every sampled one
        own["per_device_train_batch_size"] = values["per_device_train_batch_size"] // 2
    config = TrainConfig.parse(TrainConfig.values_for(run.method, own), f"comparison, {run.method}")
    least, length, completions = (
        config.min_completion_length, config.max_completion_length, values["per_device_train_batch_size"]
    )  # fmt: skip
    if least != length:
        allowed = f"max_completion_length = {length}: KL a completion is T times KL a token only then"
        raise InputError("min_completion_length", least, allowed)
    if config.batch_completions != completions:
        allowed = f"a number that gives {run.method} as many completions as the others"
        raise InputError("per_device_train_batch_size", completions, allowed)
    return config


def train_once(shared: Shared, run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train and evaluate one run.

    Args:
        shared: What all runs have in common.
        run: The run.

    Returns:
        Rows of `CURVES` (the untrained policy first) and the row of `FINALS`.
    """
    config, task = run_config(run, shared.values), shared.task(run.seed)
    result = run_training(config, task)
    name = {"method": run.method, "beta": run.beta, "seed": run.seed}
    curve = [name | figures for figures, _ in evaluations(result, config.max_completion_length)]
    texts = task.validation_prompts[: config.kl_eval_prompts]
    lengths = (config.max_completion_length, config.max_prompt_length, config.min_completion_length)
    after, before = result.after, result.before
    final = curve[-1] | {
        "reward": float(after.reward.mean()),
        "gold": float(after.gold.mean()),
        "kl": float(after.kl.mean()) * config.max_completion_length,
        "gain": float((after.reward - before.reward).mean()),
        "gold_gain": float((after.gold - before.gold).mean()),
        "perplexity": perplexity(*reference_nats(task.backbone, texts, *lengths)),
        "distinct1": distinct_n(after.completions, 1),
        "distinct2": distinct_n(after.completions, 2),
    }
    return curve, final


def untrained(shared: Shared) -> dict[str, float]:
    """Figures of the policy before any training, on the prompts of the final evaluation.

    Returns:
        ``reward``, ``gold`` (only with a judge), ``perplexity``, ``distinct1``, ``distinct2``.
    """
    config, task = run_config(Run("ste", 0.0, 0, 1e-3), shared.values), shared.task(0)
    start = evaluate_task(config, task, config.final_eval_prompts)
    texts = task.validation_prompts[: config.kl_eval_prompts]
    lengths = (config.max_completion_length, config.max_prompt_length, config.min_completion_length)
    figures = {
        "reward": float(start.reward.mean()),
        "gold": float(start.gold.mean()),
        "perplexity": perplexity(*reference_nats(task.backbone, texts, *lengths)),
        "distinct1": distinct_n(start.completions, 1),
        "distinct2": distinct_n(start.completions, 2),
    }
    return {name: value for name, value in figures.items() if not math.isnan(value)}


def run_all(shared: Shared, runs: Sequence[Run], processes: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train every run.

    Args:
        shared: What all runs have in common.
        runs: The runs; all settings are checked before the first starts.
        processes: Worker processes of one thread each; 1: this process, with its threads. Seconds are comparable
            within one call only.

    Returns:
        `CURVES` and `FINALS` of all runs, in their order.

    Raises:
        InputError: If there is no run, or settings do not fit.
    """
    if not runs:
        raise InputError("runs", "none", "at least one method, weight of KL and seed")
    for run in runs:
        run_config(run, shared.values)
    work, done = in_workers(train_once, shared, runs, processes), {}
    for _, (number, result) in zip(progress(runs, "training runs"), work, strict=True):
        done[number] = result
    curves = [row for number in range(len(runs)) for row in done[number][0]]
    finals = [done[number][1] for number in range(len(runs))]
    return pd.DataFrame(curves, columns=list(CURVES)), pd.DataFrame(finals, columns=list(FINALS))


def search(
    shared: Shared, methods: Sequence[str], learning_rates: Sequence[float], beta: float, seed: int,
    processes: int = 1,
) -> tuple[dict[str, float], pd.DataFrame]:  # fmt: skip
    """Choose each method's learning rate from one grid.

    Args:
        shared: What all runs have in common; evaluated on held-out training prompts.
        methods: Methods.
        learning_rates: The grid; with a single one nothing is run, nor without methods.
        beta: Weight of KL of the search.
        seed: A seed that the comparison does not use.
        processes: As in `run_all`.

    Returns:
        Method to learning rate, and the table of what was tried: `objective` is reward minus beta times KL a token.
    """
    if len(learning_rates) == 1 or not methods:
        return dict.fromkeys(methods, learning_rates[0]), pd.DataFrame(columns=list(SEARCHED))
    runs = [Run(method, beta, seed, rate) for method in methods for rate in learning_rates]
    _, finals = run_all(replace(shared, on_search_prompts=True), runs, processes)
    table = finals[["method", "reward", "kl"]].assign(learning_rate=[run.learning_rate for run in runs])
    table["objective"] = table["reward"] - beta * table["kl"] / shared.values["max_completion_length"]
    best = table.loc[table.groupby("method", sort=False)["objective"].idxmax()]
    return dict(zip(best["method"], best["learning_rate"], strict=True)), table[list(SEARCHED)]


def _common(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in TrainConfig.values_for("ste", values).items() if k != "method"}
