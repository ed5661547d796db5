"""Many training runs side by side: what the experiments that train by the dozen share.

Every run is `grade.training.run.run_training` with the same prompts and evaluation. A seed decides the adapter, the
order of the prompts and the noise.
"""

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from grade.data.reviews import load_reviews, prompt_text
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.results import progress
from grade.rewards.gold import GoldJudge
from grade.rewards.model import load_reward
from grade.training.config import TrainConfig
from grade.training.load import Task
from grade.training.run import RunResult, run_training
from grade.training.toy import toy_task

FIXED: dict[str, Any] = {
    "lr_scheduler_type": "constant", "eval_strategy": "steps", "truncation": "right", "raw_prompts": True,
    "use_cpu": True,
}  # fmt: skip
"""Settings of all runs: prompts are beginnings of reviews, cut to their length; one process of the CPU."""
QUIET: dict[str, Any] = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
"""Settings of runs that others look at: nothing is written."""
UNEVALUATED = QUIET | {"eval_strategy": "no", "eval_on_start": False, "eval_on_end": False}
"""The same without evaluations, where only time and memory count or a policy is evaluated elsewhere."""


def sizes(
    prompt_tokens: int, new_tokens: int, completions: int, steps: int, eval_every: int, eval_prompts: int
) -> dict[str, Any]:  # fmt: skip
    """Settings of runs whose completions have a fixed length; all evaluations are of the same prompts."""
    return FIXED | {
        "max_prompt_length": prompt_tokens, "max_completion_length": new_tokens, "min_completion_length": new_tokens,
        "per_device_train_batch_size": completions, "max_steps": steps, "eval_steps": eval_every,
        "eval_prompts": eval_prompts, "final_eval_prompts": eval_prompts, "kl_eval_prompts": eval_prompts,
    }  # fmt: skip


SETTINGS: dict[str, dict[str, Any]] = {
    "ste": {"hops": 1, "tau_start": 2.0, "tau_end": 2.0},
    "gumbel": {"hops": 0, "tau_start": 0.5, "tau_end": 0.5},
    "gumbel_rao": {"hops": 1, "tau_start": 2.0, "tau_end": 2.0},
    "reinmax": {"hops": 1, "tau_start": 2.0, "tau_end": 2.0},
    "rloo": {"num_generations": 4},
    "grpo": {"num_generations": 4, "scale_rewards": "group"},
}
"""Settings of a method beside the shared ones: tau and hops as in Experiment 6, groups of 4, grpo as published."""

SEARCH_PROMPTS = 512
"""Training prompts that no run trains on; the learning rates are chosen on them."""


@dataclass(frozen=True)
class Run:
    """One training run: columns that name it in tables, fields of `TrainConfig`, one of the bench's bases, its reward.

    Fields of other methods are left out.
    """

    names: Mapping[str, Any]
    values: Mapping[str, Any]
    policy: str = "policy"
    reward: str = ""

    @property
    def config(self) -> TrainConfig:
        """The run's settings."""
        method = self.values["method"]
        return TrainConfig.parse(TrainConfig.values_for(method, self.values), f"training run, {method}")


@dataclass(frozen=True)
class Bench:
    """Models and prompts of many runs; sent to each worker process once.

    An experiment says in a subclass which rewards there are, and what else its tables hold. ``bases`` are folders of
    policies, an empty one the toy task's, which has a judge and prompts of its own. ``on_search_prompts``: evaluate on
    held-out training prompts instead of the validation split.
    """

    bases: Mapping[str, str]
    gold_file: str = ""
    reviews_dir: str = ""
    on_search_prompts: bool = False

    def reward(self, run: Run, backbone: Backbone) -> Any:
        """The reward that training sees: the toy task's own, or that in the folder ``run.reward``."""
        return load_reward(run.reward, backbone) if self.bases[run.policy] else self.loaded[run.policy].reward_model

    def ended(self, run: Run, task: Task, result: RunResult) -> dict[str, Any]:
        """More columns of the end of a run."""
        return {}

    def adapter(self, policy: str) -> LoraSettings:
        """The adapter that a policy's runs train."""
        return LoraSettings() if self.bases[policy] else LoraSettings(r=4, alpha=8)

    def load(self, policy: str) -> Task:
        """A policy with its judge and prompts; of the toy task with the reward too."""
        if not self.bases[policy]:
            task = toy_task()
            train, held_out = split(task.train_prompts, task.validation_prompts, self.on_search_prompts)
            return replace(task, train_prompts=train, validation_prompts=held_out)
        judge = GoldJudge.load(self.gold_file) if self.gold_file else None
        texts = review_prompts(self.reviews_dir, self.on_search_prompts)
        return Task(Backbone.load(self.bases[policy], lora=LoraSettings()), None, judge, *texts)

    @cached_property
    def loaded(self) -> dict[str, Task]:
        """Tasks without reward by policy; each serves all runs of its policy."""
        return {}

    def task(self, run: Run) -> Task:
        """The run's task with a fresh adapter."""
        if run.policy not in self.loaded:
            self.loaded[run.policy] = self.load(run.policy)
        task = self.loaded[run.policy]
        task.backbone.peft.unload()
        task.backbone.add_adapter(self.adapter(run.policy), run.values["seed"])
        return replace(task, reward_model=self.reward(run, task.backbone))


def train_once(bench: Bench, run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train and evaluate one run: a row per evaluation, the untrained policy first, and the last one with its end.

    Step, samples, seconds of training alone, reward, gold (NaN without a judge), KL in nats per completion; at the end
    `Bench.ended` too.
    """
    config, task = run.config, bench.task(run)
    result, rows = run_training(config, task), []
    for row in result.history:
        if row.get("val/reward_mean") is not None:
            figures = {key: row[key] for key in ("step", "samples", "seconds")}
            figures |= {"reward": row["val/reward_mean"], "gold": row.get("val/gold_mean", math.nan)}
            figures["kl"] = row["val/kl"] * config.max_completion_length
            rows.append({**run.names, **figures})
    return rows, rows[-1] | bench.ended(run, task, result)


def train_all(bench: Bench, runs: Sequence[Run], processes: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows of all runs and their ends, in order; all settings are checked before the first run starts.

    With 1 process it is this one, with its threads, else workers of one thread; compare seconds within one call only.
    """
    for run in runs:
        _ = run.config
    if processes == 1:
        results = [train_once(bench, run) for run in progress(runs, "training runs")]
    else:
        context = multiprocessing.get_context("spawn")  # not a fork: torch's threads do not survive one
        with ProcessPoolExecutor(processes, context, _start_worker, (bench,)) as pool:
            results = list(progress(pool.map(_train, runs), "training runs"))
    return pd.DataFrame([row for rows, _ in results for row in rows]), pd.DataFrame([end for _, end in results])


def _start_worker(bench: Bench) -> None:
    global _bench
    torch.set_num_threads(1)
    _bench = bench


def _train(run: Run) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return train_once(_bench, run)


def review_prompts(reviews_dir: str, on_search_prompts: bool = False) -> tuple[list[str], list[str]]:
    """Prompts of training, and those of evaluation; see `split`."""
    parts = ([prompt_text(r.text) for r in load_reviews(reviews_dir, part)] for part in ("policy", "validation"))
    return split(*parts, on_search_prompts)


def split(train: Sequence[Any], held_out: Sequence[Any], on_search_prompts: bool) -> tuple[list[Any], list[Any]]:
    """Prompts to train on, and to evaluate on: the held-out ones, or those on which learning rates are chosen.

    The latter are the last `SEARCH_PROMPTS` of training (half, if there are few), on which no run trains.
    """
    n = min(SEARCH_PROMPTS, len(train) // 2)
    return list(train[:-n]), list(train[-n:] if on_search_prompts else held_out)
