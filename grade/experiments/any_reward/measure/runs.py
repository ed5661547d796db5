"""Training runs of every method on every kind of reward, compared at equal KL.

Every method but `ste` and `st` gets the reward as a black box. Each run has a target for KL (a trainer setting that
changes beta along the run), because gradients of different methods are of different size and equal beta would not be
equal pressure. Every method gets the same number of completions per step, and one learning rate from one grid
(`chosen_rates`).

Completions have a fixed length T, so that KL per completion is T times KL per token and no method gains by stopping
early. Those of `sums` end by themselves after two or three tokens; there T times KL per token is slightly more than KL
per completion.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from grade.errors import InputError
from grade.experiments.any_reward.measure.rewards import DIFFERENTIABLE, REWARDS, BlackBox, Folders, make_reward
from grade.experiments.any_reward.measure.sums import ANSWER_TOKENS, load_sums
from grade.experiments.frontier import mixed_reward
from grade.experiments.measured import published_text, read_csv
from grade.experiments.training_runs import FIXED, SETTINGS, Bench, Run, hold_out, train_all
from grade.models.backbone import Backbone
from grade.rewards.base import Reward
from grade.training.load import Task

METHODS: dict[str, dict[str, Any]] = {
    "rloo": SETTINGS["rloo"],
    "grpo": SETTINGS["grpo"],
    "ppo": {"num_generations": 4},
    "ste": SETTINGS["ste"],
    "st": {"hops": 1},
    "plug_in": SETTINGS["distilled"] | {"method": "distilled", "residual_weight": 0.0},
    "corrected": SETTINGS["distilled"] | {"method": "distilled", "residual_weight": 1.0},
    "auto": SETTINGS["distilled"] | {"method": "distilled", "residual_weight": "auto"},
}
"""Methods by label; ``method`` where the trainer's name is another."""
DIFFERENTIATING = ("ste", "st")
"""Methods that see the reward itself; all others see its values only."""
OF_SUMS: dict[str, Any] = {"max_completion_length": ANSWER_TOKENS, "min_completion_length": 0}
"""Instead of the shared settings: completions of `sums` end by themselves."""
SEARCH_SEEDS = (100, 101, 102, 103, 104)
"""Seeds of the search of learning rates, which no other run has."""
SEARCHED_RATES = (3.0e-3, 6.0e-3, 1.0e-2, 2.0e-2)
SEARCH_KL = 10.0
"""The search's target for KL, in nats per completion."""
NAMES = ("policy", "trained_on", "method", "target_kl", "seed", "completions", "learning_rate")
"""Columns that name a run."""
DISTILLED = ("r2", "slope", "trust", "residual_weight")
"""What the distilled method logs: R2 out of sample, the slope of the reward on its prediction, the share of predictions
that came true, the weight of the residual. Means over the step's microbatches, of the step before the evaluation."""
COLUMNS = (*NAMES, "step", "samples", "seconds", "reward", "gold", "kl", *DISTILLED, "family")
"""Columns of the evaluations along training; KL in nats per completion, seconds of training alone; ``family`` is the
one that explains most."""


@dataclass(frozen=True)
class Rewards(Bench):
    """A bench with every reward of each policy, as its method may see it."""

    folders: Mapping[str, Folders] = field(default_factory=dict)
    made: dict[tuple[str, str], Reward] = field(default_factory=dict)

    def load(self, policy: str) -> Task:
        """A policy with its judge and prompts."""
        if policy != "sums":
            return super().load(policy)
        sums = load_sums(self.bases[policy])
        train, search = hold_out(sums.train)
        return Task(sums.backbone, None, None, train, search if self.on_search_prompts else sums.heldout)

    def reward(self, run: Run, backbone: Backbone) -> Reward:
        """The reward, or its values alone."""
        key = run.policy, run.reward
        if key not in self.made:
            self.made[key] = make_reward(run.reward, backbone, self.folders[run.policy])
        return self.made[key] if run.names["method"] in DIFFERENTIATING else BlackBox(self.made[key])

    def evaluated(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What the distilled method says about its fit."""
        r2 = {name.rpartition("/")[2]: value for name, value in row.items() if name.startswith("train/distilled/r2/")}
        figures = {name: row.get(f"train/distilled/{name}", math.nan) for name in DISTILLED}
        figures["residual_weight"] = row.get("train/residual_weight", math.nan)
        return figures | {"family": max(r2, key=r2.get) if r2 else ""}


def make_run(
    policy: str, reward: str, method: str, target_kl: float, seed: int, learning_rate: float, completions: int,
    values: Mapping[str, Any],
) -> Run:  # fmt: skip
    """One run; ``values`` are fields of `TrainConfig`, of which the sums and the method set some themselves."""
    if reward not in REWARDS[policy]:
        raise InputError("reward", reward, f"for {policy} one of {', '.join(REWARDS[policy])}")
    if method not in METHODS:
        raise InputError("method", method, f"one of {', '.join(METHODS)}")
    if method in DIFFERENTIATING and reward not in DIFFERENTIABLE:
        raise InputError("reward", reward, f"for {method} one of {', '.join(DIFFERENTIABLE)}")
    names = dict(zip(NAMES, (policy, reward, method, float(target_kl), seed, completions, learning_rate), strict=True))
    own = {"beta": 0.1, "per_device_eval_batch_size": 128, "eval_noise_block": 128, "method": method}
    own |= FIXED | dict(values) | (OF_SUMS if policy == "sums" else {}) | METHODS[method]
    own |= {"target_kl": float(target_kl), "seed": seed, "learning_rate": learning_rate,
            "per_device_train_batch_size": completions}  # fmt: skip
    return Run(names, own, policy, reward)


def run_all(bench: Bench, runs: Sequence[Run], finished: pd.DataFrame, processes: int = 1) -> pd.DataFrame:
    """`COLUMNS` of all runs, in their order; those in a table of finished ones are not trained again."""
    known = _by_run(finished)
    todo = [run for run in runs if _key(run) not in known]
    if todo:
        known |= _by_run(train_all(bench, todo, processes)[0])
    return pd.concat([known[_key(run)] for run in runs], ignore_index=True)[list(COLUMNS)]


def published_runs(folder: str) -> pd.DataFrame:
    """`COLUMNS` of the runs in a folder of results as git has it; without times where it has none."""
    texts = {name: published_text(f"{folder}/{name}.csv") for name in
             ("measured/search", "measured/runs", "timings/run_seconds")}  # fmt: skip
    search, runs, seconds = (read_csv(io.StringIO(text)) if text else pd.DataFrame(columns=[*NAMES, "step"])
                             for text in texts.values())  # fmt: skip
    runs = runs.merge(seconds, on=[*NAMES, "step"], how="left")
    return pd.concat([search, runs], ignore_index=True).reindex(columns=list(COLUMNS))


def chosen_rates(table: pd.DataFrame, level: float) -> dict[str, float]:
    """Each method's learning rate: that of the highest reward at equal KL, averaged over evaluations and seeds.

    At an evaluation the best mixture of two policies so far counts, the untrained one among them, whose KL is at most
    the level. The average rewards a rate that learns early as well as one that learns much, and has less noise than
    the last evaluation alone.
    """
    best: dict[str, tuple[float, float]] = {}
    for (method, rate), seeds in table.groupby(["method", "learning_rate"], sort=False):
        learned = []
        for _, run in seeds.groupby("seed"):
            kl, reward = (run.sort_values("step")[name].tolist() for name in ("kl", "reward"))
            learned.append(statistics.fmean(mixed_reward(kl[:n], reward[:n], level) for n in range(2, len(kl) + 1)))
        best[method] = max(best.get(method, (-math.inf, 0.0)), (statistics.fmean(learned), rate))
    return {method: rate for method, (_, rate) in best.items()}


def _by_run(table: pd.DataFrame) -> dict[tuple, pd.DataFrame]:
    return {(*names, rows["step"].max()): rows for names, rows in table.groupby(list(NAMES), sort=False)}


def _key(run: Run) -> tuple:
    return *run.names.values(), run.values["max_steps"]
