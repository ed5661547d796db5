"""Training runs of every method on every kind of reward, compared at equal KL.

Every method but `ste` and `st` gets the reward as a black box. Each run has a target for KL (a trainer setting that
changes beta along the run), because gradients of different methods are of different size and equal beta would not be
equal pressure. A seed decides the adapter, the order of the prompts and the noise; every method gets the same number of
completions a step, and one learning rate from one grid (`chosen_rates`).

A finished run is a line of ``runs.jsonl`` in a folder, and is read from there instead of being trained again: a
measurement of hours that is stopped goes on where it was.

Completions have a fixed length T, so that KL a completion is T times KL a token and no method gains by stopping early.
Those of `sums` end by themselves after two or three tokens; there T times KL a token is slightly more than KL a
completion.

Left out: statistics (`grade.experiments.any_reward.learning`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from grade.errors import InputError
from grade.experiments.any_reward.measure.rewards import REWARDS, BlackBox, Folders, make_reward
from grade.experiments.any_reward.measure.sums import ANSWER_TOKENS, SumsConfig, build_sums, load_sums
from grade.experiments.frontier import mixed_reward
from grade.experiments.measured import progress
from grade.experiments.training_runs import FIXED, SETTINGS, evaluations, hold_out, in_workers, review_prompts
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.rewards.gold import GoldJudge
from grade.training.config import TrainConfig
from grade.training.load import Task
from grade.training.run import run_training
from grade.training.toy import toy_task

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
DIFFERENTIABLE = ("bag", "trunk1", "trunk4", "trunk")
"""Rewards that these can be run on."""
SETTING: dict[str, Any] = FIXED | {
    "beta": 0.1, "max_prompt_length": 12, "max_completion_length": 24, "min_completion_length": 24, "eval_steps": 5,
    "eval_prompts": 128, "final_eval_prompts": 128, "kl_eval_prompts": 128, "per_device_eval_batch_size": 128,
}  # fmt: skip
"""Settings of all runs; beta is where the controller of KL starts."""
OF_SUMS: dict[str, Any] = {"max_completion_length": ANSWER_TOKENS, "min_completion_length": 0}
"""Instead of these, for `sums`: its completions end by themselves."""
DISTILLED = ("r2", "slope", "trust", "residual_weight")
"""What the distilled method logs: R2 out of sample, the slope of the reward on its prediction, the share of predictions
that came true, the weight of the residual. Means over the step's microbatches, of the step before the evaluation."""
COLUMNS = (
    "policy", "trained_on", "method", "target_kl", "seed", "completions", "learning_rate", "step", "samples", "seconds",
    "reward", "gold", "kl", *DISTILLED, "family",
)  # fmt: skip
"""Columns of the evaluations along training; KL in nats a completion, seconds of training alone; ``family`` is the one
that explains most."""
FILE = "runs.jsonl"


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        policy: ``tiny``, ``smollm2`` or ``sums``.
        reward: One of the policy's `REWARDS`.
        method: One of `METHODS`.
        target_kl: In nats a completion.
        seed: Of adapter, prompts and noise.
        learning_rate: Constant.
        completions: A step.
        steps: Optimizer steps.
    """

    policy: str
    reward: str
    method: str
    target_kl: float
    seed: int
    learning_rate: float
    completions: int = 32
    steps: int = 40


@dataclass(frozen=True)
class Shared:
    """Models, prompts and settings of all runs; sent to each worker process once.

    Attributes:
        bases: Folder of each policy; an empty name: the toy task's. That of ``sums`` is made where it is missing.
        folders: Reward models of each policy.
        reviews: Folder of the review splits.
        gold: File of the judge that evaluates; empty: the toy task's.
        values: Fields of `TrainConfig` in place of those of `SETTING`.
        on_search_prompts: Evaluate on held-out training prompts instead of the validation split.
        sums: How the policy of sums is made.
    """

    bases: Mapping[str, str]
    folders: Mapping[str, Folders] = field(default_factory=dict)
    reviews: str = ""
    gold: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    on_search_prompts: bool = False
    sums: SumsConfig = SumsConfig()

    @cached_property
    def judge(self) -> GoldJudge | None:
        """The gold judge of evaluations; None for a toy, which has its own."""
        return GoldJudge.load(self.gold) if self.gold else None

    @cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """Prompts of training and of evaluation, from reviews."""
        return review_prompts(self.reviews, self.on_search_prompts)

    @cached_property
    def loaded(self) -> dict[str, Task]:
        """Tasks without reward that were loaded already; each serves all runs of its policy."""
        return {}

    def task(self, run: Run) -> Task:
        """The run's task with a fresh adapter, and the reward as its method may see it."""
        if run.policy not in self.loaded:
            self.loaded[run.policy] = self._load(run.policy)
        task = self.loaded[run.policy]
        backbone = task.backbone
        lora = LoraSettings() if self.bases[run.policy] else LoraSettings(r=4, alpha=8)
        backbone.peft.unload()
        backbone.add_adapter(lora, run.seed)
        key = f"{run.policy} {run.reward}"
        if key not in self.loaded:
            reward = make_reward(run.reward, backbone, self.folders.get(run.policy, Folders()))
            self.loaded[key] = dataclasses.replace(task, reward_model=reward)
        task = self.loaded[key]
        if run.method in DIFFERENTIATING:
            return task
        return dataclasses.replace(task, reward_model=BlackBox(task.reward_model))

    def _load(self, policy: str) -> Task:
        base = self.bases[policy]
        if policy == "sums":
            build_sums(base, self.sums)
            sums = load_sums(base)
            train, search = hold_out(sums.train)
            return Task(sums.backbone, None, None, train, search if self.on_search_prompts else sums.heldout)
        if not base:
            task = toy_task()
            train, search = hold_out(task.train_prompts)
            held_out = search if self.on_search_prompts else task.validation_prompts
            return dataclasses.replace(task, train_prompts=train, validation_prompts=held_out)
        return Task(Backbone.load(base, lora=LoraSettings()), None, self.judge, *self.texts)


def run_config(run: Run, values: Mapping[str, Any]) -> TrainConfig:
    """The run's settings.

    Args:
        run: The run.
        values: Fields of `TrainConfig` in place of those of `SETTING`.

    Raises:
        InputError: For an unknown policy, reward or method, one that needs a differentiable reward and has none, or
            settings that do not fit.
    """
    if run.policy not in REWARDS:
        raise InputError("policy", run.policy, f"one of {', '.join(REWARDS)}")
    if run.reward not in REWARDS[run.policy]:
        raise InputError("reward", run.reward, f"for {run.policy} one of {', '.join(REWARDS[run.policy])}")
    if run.method not in METHODS:
        raise InputError("method", run.method, f"one of {', '.join(METHODS)}")
    if run.method in DIFFERENTIATING and run.reward not in DIFFERENTIABLE:
        raise InputError("reward", run.reward, f"for {run.method} one of {', '.join(DIFFERENTIABLE)}")
    own = {"method": run.method} | METHODS[run.method]
    own = SETTING | dict(values) | (OF_SUMS if run.policy == "sums" else {}) | own
    own |= {
        "target_kl": run.target_kl, "seed": run.seed, "learning_rate": run.learning_rate, "max_steps": run.steps,
        "per_device_train_batch_size": run.completions, "eval_noise_block": 128,  # here: `_key` knows finished runs
    }  # fmt: skip
    return TrainConfig.parse(TrainConfig.values_for(own["method"], own), f"any reward, {run.method}")


def train_once(shared: Shared, run: Run) -> list[dict[str, Any]]:
    """Train and evaluate one run.

    Args:
        shared: What all runs have in common.
        run: The run.

    Returns:
        Rows of `COLUMNS`, the untrained policy first.
    """
    config = run_config(run, shared.values)
    result = run_training(config, shared.task(run))
    rows = []
    for figures, row in evaluations(result, config.max_completion_length):
        explained = {k.rpartition("/")[2]: v for k, v in row.items() if k.startswith("train/distilled/r2/")}
        figures |= {name: row.get(f"train/distilled/{name}", math.nan) for name in DISTILLED}
        figures["residual_weight"] = row.get("train/residual_weight", math.nan)
        rows.append(_name(run) | figures | {"family": max(explained, key=explained.get) if explained else ""})
    return rows


def run_all(shared: Shared, runs: Sequence[Run], folder: str | Path = "", processes: int = 1) -> pd.DataFrame:
    """Train every run that is not in the folder yet.

    Args:
        shared: What all runs have in common.
        runs: The runs; all settings are checked before the first starts.
        folder: Keeps what is finished, run by run; empty: nothing is kept.
        processes: Worker processes of one thread each; 1: this process, with its threads.

    Returns:
        `COLUMNS` of all runs, in their order.

    Raises:
        InputError: If there is no run, settings do not fit, or a run failed; the others are finished before.
    """
    if not runs:
        raise InputError("runs", "none", "at least one")
    for run in runs:
        run_config(run, shared.values)
    keys = [_key(shared, run) for run in runs]
    path = Path(folder, FILE) if folder else None
    known = read_runs(path) if path else {}
    todo = [(key, run) for key, run in dict(zip(keys, runs, strict=True)).items() if key not in known]
    failed = ""
    work = in_workers(_attempt, shared, [run for _, run in todo], processes)
    for _, (number, rows) in zip(progress(todo, "training runs"), work, strict=True):
        key, run = todo[number]
        if isinstance(rows, str):
            failed = failed or f"no error ({rows}), with {run}"
            continue
        known[key] = rows
        if path:
            _append(path, key, rows)
    if failed:
        raise InputError("a training run", "an error", failed)
    return pd.DataFrame([row for key in keys for row in known[key]], columns=list(COLUMNS))


def chosen_rates(table: pd.DataFrame, level: float) -> dict[str, float]:
    """Each method's learning rate: that of the highest reward at equal KL, averaged over evaluations and seeds.

    At an evaluation the best mixture of two policies so far counts, the untrained one among them, whose KL is at most
    the level. The average rewards a rate that learns early as well as one that learns much, and has less noise than
    the last evaluation alone.

    Args:
        table: `COLUMNS` of a search, one run for each method, rate and seed.
        level: KL in nats a completion.

    Returns:
        Method to learning rate.

    Raises:
        InputError: If runs of a method differ in more than the rate.
    """
    best: dict[str, tuple[float, float]] = {}
    for (method, rate), seeds in table.groupby(["method", "learning_rate"], sort=False):
        found = statistics.fmean(_learned(rows, level) for _, rows in seeds.groupby("seed"))
        best[method] = max(best.get(method, (-math.inf, 0.0)), (found, rate))
    return {method: rate for method, (_, rate) in best.items()}


def _learned(run: pd.DataFrame, level: float) -> float:
    if run["step"].duplicated().any():
        name = "{method} at {learning_rate:g}".format_map(run.iloc[0])
        raise InputError("search", f"several runs of {name} with a seed", "one run for each method, rate and seed")
    kl, reward = (run.sort_values("step")[name].tolist() for name in ("kl", "reward"))
    return statistics.fmean(mixed_reward(kl[:n], reward[:n], level) for n in range(2, len(kl) + 1))


def read_runs(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of finished runs by key. A line that was cut off when a measurement was killed is left out.

    Raises:
        InputError: If a line is none of `run_all`.
    """
    runs = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        try:
            key, columns = record["key"], record["columns"]
            runs[key] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        except (KeyError, TypeError, AttributeError, ValueError):
            raise InputError(str(path), f"{line[:40]}...", "lines with the key of a run and its columns") from None
    return runs


def read_table(folder: str | Path) -> pd.DataFrame:
    """`COLUMNS` of everything that is finished in a folder of `run_all`, whatever its settings."""
    rows = [row for rows in read_runs(Path(folder, FILE)).values() for row in rows]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _append(path: Path, key: str, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        start = b""
        if file.tell():  # a line that was cut off gets an end
            file.seek(-1, 2)
            start = b"" if file.read() == b"\n" else b"\n"
        columns = {name: [row[name] for row in rows] for name in rows[0]}  # every name once: a third less to keep
        file.write(start + json.dumps({"key": key, "columns": columns}).encode() + b"\n")


def _attempt(shared: Shared, run: Run) -> list[dict[str, Any]] | str:
    """`train_once`; the message of an error, which must not end hours of other runs."""
    try:
        return train_once(shared, run)
    except InputError as error:
        return str(error)


def _key(shared: Shared, run: Run) -> str:
    """All settings of a run."""
    own = {"sums": shared.sums.model_dump()} if run.policy == "sums" else {
        "base": shared.bases[run.policy], "reviews": shared.reviews, "gold": shared.gold,
        "folders": dataclasses.asdict(shared.folders.get(run.policy, Folders())),
    }  # fmt: skip
    values = SETTING | dict(shared.values) | METHODS[run.method]
    about = own | {"values": values, "on_search_prompts": shared.on_search_prompts}
    return json.dumps(dataclasses.asdict(run) | about, sort_keys=True)


def _name(run: Run) -> dict[str, Any]:
    return {
        "policy": run.policy, "trained_on": run.reward, "method": run.method, "target_kl": run.target_kl,
        "seed": run.seed, "completions": run.completions, "learning_rate": run.learning_rate,
    }  # fmt: skip
