"""Which training runs there are, and their tables: a search of learning rates, and grids of methods and rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from grade.errors import InputError
from grade.experiments.any_reward.measure.runs import COLUMNS, DIFFERENTIABLE, DIFFERENTIATING, METHODS, Run

SEARCH_REWARDS = ("gold", "trunk")
"""On which the learning rate of a method is chosen: one that is no function of embeddings, or, for `ste` and `st`, one
that is."""
SEARCH_SEEDS = (100, 101, 102, 103, 104)
"""Seeds that no other run has."""
TIMED = ("seconds",)
RUN = ("policy", "trained_on", "method", "target_kl", "seed", "completions", "learning_rate", "step")
"""Columns that name an evaluation."""


def methods_for(reward: str) -> tuple[str, ...]:
    """All methods that can be run on a reward."""
    return tuple(method for method in METHODS if method not in DIFFERENTIATING or reward in DIFFERENTIABLE)


def grid(
    rewards: Sequence[str], target_kls: Sequence[float], seeds: Sequence[int], rates: Mapping[str, float],
    policy: str = "tiny", methods: Sequence[str] | None = None, completions: int = 32, steps: int = 40,
) -> list[Run]:  # fmt: skip
    """Every method on every reward at every target, seed by seed: a measurement that is stopped has whole seeds.

    Args:
        rewards: Rewards; ``sums`` has a policy of its own.
        target_kls: In nats a completion.
        seeds: Seeds.
        rates: Method to learning rate.
        policy: Of all other rewards.
        methods: Methods; None: all that have a rate. Those that a reward does not allow are left out.
        completions: A step.
        steps: Optimizer steps.

    Returns:
        The runs.
    """
    methods = list(rates) if methods is None else methods
    policies = {"sums": "sums"}
    return [
        Run(policies.get(reward, policy), reward, method, float(target), seed, rates[method], completions, steps)
        for seed in seeds for target in target_kls for reward in rewards
        for method in methods if method in methods_for(reward)
    ]  # fmt: skip


def search_runs(
    methods: Sequence[str], learning_rates: Sequence[float], target_kl: float, policy: str = "tiny",
    completions: int = 32, steps: int = 40,
) -> list[Run]:  # fmt: skip
    """Every method at every learning rate on one of `SEARCH_REWARDS`, with `SEARCH_SEEDS`."""
    own = dict(policy=policy, completions=completions, steps=steps)
    return [
        run
        for method in methods for rate in learning_rates
        for run in grid([SEARCH_REWARDS[method in DIFFERENTIATING]], [target_kl], SEARCH_SEEDS, {method: rate}, **own)
    ]  # fmt: skip


def finished(table: pd.DataFrame, runs: Sequence[Run], folder: str | Path) -> pd.DataFrame:
    """The evaluations of some runs out of a table of finished ones.

    Args:
        table: `COLUMNS`, of any runs.
        runs: Which.
        folder: Where the table is from.

    Raises:
        InputError: If a run is not there.
    """
    known = {(*names, rows["step"].max()): rows for names, rows in table.groupby(list(RUN[:-1]), sort=False)}
    keys = [
        (run.policy, run.reward, run.method, run.target_kl, run.seed, run.completions, run.learning_rate, run.steps)
        for run in runs
    ]
    if missing := [key for key in keys if key not in known]:
        names = ", ".join(f"{name} {value}" for name, value in zip((*RUN[:-1], "steps"), missing[0], strict=True))
        allowed = f"a folder with all {len(keys)} runs; {len(missing)} are missing, the first: {names}"
        raise InputError("finished_dir", str(folder), allowed)
    return pd.concat([known[key] for key in keys], ignore_index=True)


def untimed(table: pd.DataFrame) -> pd.DataFrame:
    """`COLUMNS` of a table of runs that are the same whenever they are trained again."""
    return table[[name for name in COLUMNS if name not in TIMED]]


def timed(table: pd.DataFrame) -> pd.DataFrame:
    """The seconds of a table of runs, with what names the evaluation."""
    return table[[*RUN, *TIMED]]
