"""Which training runs there are, and their tables: a search of learning rates, and grids of methods and rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from grade.experiments.any_reward.measure.runs import (
    COLUMNS,
    DIFFERENTIABLE,
    DIFFERENTIATING,
    METHODS,
    Run,
    Shared,
    chosen_rates,
    run_all,
)

SEARCH_REWARDS = ("gold", "trunk")
"""On which the learning rate of a method is chosen: one that is no function of embeddings, or, for `ste` and `st`, one
that is."""
SEARCH_SEED = 100
"""A seed that no other run has."""
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
    """Every method at every learning rate, on one of `SEARCH_REWARDS`."""
    own = dict(policy=policy, completions=completions, steps=steps)
    return [
        run
        for method in methods for rate in learning_rates
        for run in grid([SEARCH_REWARDS[method in DIFFERENTIATING]], [target_kl], [SEARCH_SEED], {method: rate}, **own)
    ]  # fmt: skip


def search(
    shared: Shared, runs: Sequence[Run], folder: str | Path = "", processes: int = 1
) -> tuple[dict[str, float], pd.DataFrame]:
    """Choose each method's learning rate from one grid.

    Args:
        shared: What all runs have in common; evaluated on held-out training prompts.
        runs: Of `search_runs`.
        folder: As in `run_all`.
        processes: As in `run_all`.

    Returns:
        Method to learning rate, chosen at the target for KL, and the evaluations of all runs.
    """
    table = run_all(dataclasses.replace(shared, on_search_prompts=True), runs, folder, processes)
    return chosen_rates(table, runs[0].target_kl), table


def untimed(table: pd.DataFrame) -> pd.DataFrame:
    """`COLUMNS` of a table of runs that are the same whenever they are trained again."""
    return table[[name for name in COLUMNS if name not in TIMED]]


def timed(table: pd.DataFrame) -> pd.DataFrame:
    """The seconds of a table of runs, with what names the evaluation."""
    return table[[*RUN, *TIMED]]
