"""Training runs of every method on every kind of reward, compared at equal KL.

Every method but `ste` and `st` gets the reward as a black box. Each run has a budget for KL (a trainer setting that
scales its steps), because gradients of different methods are of different size and equal beta would not be equal
pressure. Every method gets the same number of completions per step, and one learning rate from one grid
(`chosen_rates`).

Completions have a fixed length T, so that KL per completion is T times KL per token and no method gains by stopping
early.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, Literal, Self

import pandas as pd
from pydantic import Field, model_validator

from grade.config import Config
from grade.errors import InputError
from grade.experiments.frontier import mixed_reward
from grade.experiments.measured import Positive, Seeds, Several, Size, kept_text, read_csv
from grade.experiments.rewards import DIFFERENTIABLE, BlackBox, Models, Policy, RewardName, make_reward
from grade.experiments.training_runs import SETTINGS, Bench, Run, sizes, train_all
from grade.models.backbone import Backbone
from grade.rewards.base import Reward

Method = Literal["rloo", "grpo", "ppo", "ste", "st", "plug_in", "corrected", "auto", "auto_texts", "offline"]
_DISTILLED = SETTINGS["distilled"] | {"method": "distilled"}
OWN: dict[Method, dict[str, Any]] = {
    "ppo": {"num_generations": 4},
    "st": {"hops": 1},
    "plug_in": _DISTILLED | {"residual_weight": 0.0},
    "corrected": _DISTILLED | {"residual_weight": 1.0},
    "auto": _DISTILLED | {"residual_weight": "auto"},
    "auto_texts": _DISTILLED | {"method": "auto"},
    "offline": {"beta": 0.0},
}
"""Settings of the methods that `SETTINGS` has not; ``method`` where the trainer's name is another."""
DIFFERENTIATING = ("ste", "st")
"""Methods that see the reward itself; all others see its values only."""
SEARCH_SEEDS = (100, 101, 102, 103, 104)
"""Seeds of the search of learning rates, which no other run has."""
SEARCHED_RATES = (3.0e-3, 6.0e-3, 1.0e-2, 2.0e-2)
SEARCH_KL = 10.0
"""The search's target for KL, in nats per completion."""
NAMES = ("policy", "trained_on", "method", "target_kl", "seed", "completions", "learning_rate")
"""Columns that name a run."""
FIGURES = ("step", "samples", "reward", "gold", "kl")
"""Columns of the evaluations along training; KL in nats per completion."""
COLUMNS = (*NAMES, *FIGURES)


class Grid(Config):
    """Training runs: every method on every reward at every target for KL, seed by seed."""

    policy: Policy = "tiny"
    rewards: list[RewardName] = Field(min_length=1)
    methods: list[Method] = Field(min_length=1)  # those that a reward does not allow are left out
    target_kls: list[Positive] = Field([10.0], min_length=1)  # in nats per completion
    seeds: Seeds = Field([0, 1], min_length=1)  # one run of each method and target each
    completions: Several = 32  # a step
    steps: Size = 40  # optimizer steps
    rate_factor: Positive = 1.0  # times the learning rates that were chosen
    eval_every: Size = 5  # steps between evaluations
    eval_prompts: Several = 128  # held-out prompts of an evaluation


class RunSettings(Models):
    """What experiments of such runs have in common."""

    published: str = ""  # results whose runs are not trained again; empty: all are
    kl_levels: list[Positive] = Field([0.5, 1.0], min_length=1)  # KL at which rewards are compared
    headline_level: float = 1.0  # one of kl_levels: that of the paired figures
    processes: Size = 1  # worker processes of one thread each, for training

    @model_validator(mode="after")
    def _check_runs(self) -> Self:
        if self.headline_level not in self.kl_levels:
            raise InputError("headline_level", self.headline_level, f"one of kl_levels = {self.kl_levels}")
        if self.published and not kept_text(f"{self.published}/measured/runs.csv"):
            raise InputError("published", self.published, "a folder with measured/runs.csv, here or in git, or nothing")
        return self

    def bench(self, kind: type[Rewards] | None = None, on_search_prompts: bool = False) -> Rewards:
        """Models and prompts of the runs."""
        models = Models(**self.model_dump(include=set(Models.model_fields)))
        bases = {"tiny": self.tiny_dir, "smollm2": self.smollm2_dir}
        return (kind or Rewards)(bases, self.gold_file, self.reviews_dir, on_search_prompts, models)

    def run_all(self, bench: Rewards, runs: Sequence[Run]) -> pd.DataFrame:
        """`run_all` of those that are not published."""
        return run_all(bench, runs, published_runs(self.published, type(bench)), self.processes)


@dataclass(frozen=True)
class Rewards(Bench):
    """A bench with every reward of each policy, as its method may see it.

    Its tables have columns that name a run (``names``) and columns of an evaluation.
    """

    names: ClassVar[tuple[str, ...]] = NAMES
    columns: ClassVar[tuple[str, ...]] = FIGURES
    models: Models = field(default_factory=Models)
    made: dict[tuple[str, str], Reward] = field(default_factory=dict)

    def reward(self, run: Run, backbone: Backbone) -> Reward:
        """The reward, or its values alone."""
        key = run.policy, run.reward
        if key not in self.made:
            self.made[key] = make_reward(self.models, *key, backbone)
        return self.made[key] if run.names["method"] in DIFFERENTIATING else BlackBox(self.made[key])


def make_run(
    models: Models, grid: Grid, reward: str, method: Method, target_kl: float, seed: int, learning_rate: float
) -> Run:
    """One run with the sizes of a grid."""
    names = (grid.policy, reward, method, float(target_kl), seed, grid.completions, learning_rate)
    values = sizes(models.prompt_tokens, models.new_tokens, grid.completions, grid.steps, grid.eval_every,
                   grid.eval_prompts) | {
        "beta": 0.1, "per_device_eval_batch_size": 128, "eval_noise_block": 128, "method": method,
        "target_kl": float(target_kl), "seed": seed, "learning_rate": learning_rate,
    } | SETTINGS.get(method, {}) | OWN.get(method, {})  # fmt: skip
    return Run(dict(zip(NAMES, names, strict=True)), values, grid.policy, reward)


def grid_runs(models: Models, grid: Grid, rates: Mapping[str, float]) -> list[Run]:
    """All runs of a grid, seed by seed; methods that a reward does not allow are left out."""
    return [make_run(models, grid, reward, method, target, seed, rates[method] * grid.rate_factor)
            for seed, target, reward, method in product(grid.seeds, grid.target_kls, grid.rewards, grid.methods)
            if method not in DIFFERENTIATING or reward in DIFFERENTIABLE]  # fmt: skip


def search_runs(models: Models, grid: Grid, methods: Sequence[Method]) -> list[Run]:
    """The search for learning rates: each method at every rate on one reward, with seeds of its own.

    The reward is one that is no function of embeddings, or, for `ste` and `st`, one that is.
    """
    return [make_run(models, grid, "trunk" if method in DIFFERENTIATING else "gold", method, SEARCH_KL, seed, rate)
            for method, rate, seed in product(methods, SEARCHED_RATES, SEARCH_SEEDS)]  # fmt: skip


def run_all(
    bench: Rewards, runs: Sequence[Run], finished: pd.DataFrame, processes: int = 1
) -> pd.DataFrame:  # fmt: skip
    """Names and figures of all runs, in their order; those in a table of finished ones are not trained again."""

    def by_run(table: pd.DataFrame) -> dict[tuple, pd.DataFrame]:
        return {(*key, rows["step"].max()): rows for key, rows in table.groupby(list(bench.names), sort=False)}

    keys = [(*run.names.values(), run.values["max_steps"]) for run in runs]
    known = by_run(finished)
    if todo := [run for key, run in zip(keys, runs, strict=True) if key not in known]:
        known |= by_run(train_all(bench, todo, processes)[0])
    columns = [*bench.names, *bench.columns]
    parts = [known[key] for key in keys] or [pd.DataFrame(columns=columns)]
    return pd.concat(parts, ignore_index=True)[columns]


def published_runs(folder: str, bench: type[Rewards]) -> pd.DataFrame:
    """Names and figures of the runs in a folder of results."""
    parts = [published_table(folder, f"measured/{name}", [*bench.names, "step"]) for name in ("search", "runs")]
    return pd.concat(parts, ignore_index=True).reindex(columns=[*bench.names, *bench.columns])


def published_table(folder: str, name: str, columns: Sequence[str]) -> pd.DataFrame:
    """A table of a folder of results, as it is or as git has it; without a folder or the table an empty one."""
    text = kept_text(f"{folder}/{name}.csv") if folder else ""
    return read_csv(io.StringIO(text)) if text else pd.DataFrame(columns=list(columns))


def chosen_rates(table: pd.DataFrame, level: float) -> dict[str, float]:
    """Each method's learning rate: that of the highest reward at equal KL, averaged over evaluations and seeds.

    At an evaluation the best mixture of two policies so far counts, the untrained one among them, whose KL is at most
    the level. The average rewards a rate that learns early as well as one that learns much, and has less noise than
    the last evaluation alone. Of equal rates the highest.
    """
    best: dict[str, tuple[float, float]] = {}
    for (method, rate), seeds in table.groupby(["method", "learning_rate"], sort=False):
        learned = []
        for _, run in seeds.groupby("seed"):
            kl, reward = (run.sort_values("step")[name].tolist() for name in ("kl", "reward"))
            learned.append(statistics.fmean(mixed_reward(kl[:n], reward[:n], level) for n in range(2, len(kl) + 1)))
        best[method] = max(best.get(method, (-math.inf, 0.0)), (statistics.fmean(learned), rate))
    return {method: rate for method, (_, rate) in best.items()}
