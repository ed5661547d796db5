"""The tables of the experiment on any reward, and the settings that they depend on."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Self

import pandas as pd
from pydantic import Field, model_validator

from grade.config import Config
from grade.errors import InputError
from grade.experiments.any_reward.measure import enumerated, explained
from grade.experiments.any_reward.measure.worth import Gradients, gradient_rows, worth_table
from grade.experiments.measured import Share, Size
from grade.experiments.reward_runs import (
    NAMES,
    SEARCH_KL,
    Grid,
    Method,
    Rewards,
    RunSettings,
    chosen_rates,
    grid_runs,
    make_run,
    search_runs,
)
from grade.experiments.rewards import FamilyName, Models, Policy, RewardName, Subject, load_subject
from grade.experiments.training_runs import train_once
from grade.gradients.methods import Rate

SMOKE = Grid(
    rewards=["rule", "trunk"], methods=["rloo", "auto", "plug_in", "ste"], target_kls=[2.0], completions=8, steps=3,
    eval_every=1, eval_prompts=8,
)  # fmt: skip


class Critics(Config):
    """Critics of the enumerated policy, in whole groups of completions."""

    fitted: int = Field(32, ge=8, multiple_of=4)  # completions of the fitted critics
    best: int = Field(64, ge=8, multiple_of=4)  # completions of the others
    samples: int = Field(800, ge=160, multiple_of=8)  # completions drawn for each critic
    steps: int = Field(24, ge=20)  # draws of each whole step of the method
    shares: list[Share] = Field([0.3, 0.8], min_length=1)  # shares of the reward that add up over tokens
    scales: list[float] = Field([0.0, 1.0], min_length=1)  # factors on the critic


class Explained(Config):
    """Rewards of a policy that are distilled: untrained, and trained if it says how."""

    rewards: list[RewardName] = Field(["trunk", "rule"], min_length=1)
    sizes: list[Annotated[int, Field(ge=8, multiple_of=4)]] = Field([16, 32], min_length=1)  # completions n
    adapter: str = ""  # adapter of the trained policy
    trained_on: RewardName | None = None  # or the reward on which it is trained first, by auto


class Settings(RunSettings):
    """Models, rewards and sizes."""

    critics: Critics = Critics()  # critics of the enumerated policy
    explained: dict[Policy, Explained] = {"tiny": Explained()}  # rewards that are distilled
    explained_families: list[FamilyName] = ["counts", "bag", "values"]  # families; empty: all
    # gradients whose samples are weighed
    worth: list[Gradients] = Field([Gradients(rewards=["trunk"], prompts=4, reference=2)], min_length=1)
    tokens: dict[Policy, list[RewardName]] = {"tiny": ["gold"]}  # rewards whose tokens are shown
    tokens_completions: int = Field(64, ge=8)  # completions that those rewards are distilled from
    grids: list[Grid] = Field([SMOKE], min_length=1)  # training runs
    # method to learning rate, of an earlier search; the others, and those with null, are searched
    chosen_rates: dict[Method, Rate | None] = {"rloo": 1.0e-2, "auto": 1.0e-2, "plug_in": 1.0e-2, "ste": 1.0e-2}
    headline_kl: float = 2.0  # target for KL of the figures of samples; one of the grids'
    cost: dict[Policy, Size] = {"tiny": 8}  # policies on which a step is timed: completions a step
    cost_completions: int = Field(64, ge=8)  # completions in the store then

    @model_validator(mode="after")
    def _check(self) -> Self:
        targets = sorted({target for grid in self.grids for target in grid.target_kls})
        if self.headline_kl not in targets:
            raise InputError("headline_kl", self.headline_kl, f"one of the grids' target_kls = {targets}")
        if any(of.trained_on for of in self.explained.values()) and "auto" not in {*self.methods, *self.chosen_rates}:
            raise InputError("chosen_rates", self.chosen_rates, "a rate of auto, which trains the policy of trained_on")
        return self

    @property
    def methods(self) -> list[str]:
        """Methods of all grids."""
        return list(dict.fromkeys(method for grid in self.grids for method in grid.methods))

    @cached_property
    def enumerated(self) -> tuple[enumerated.World, dict]:
        """The enumerated policy, and what is held against its reward."""
        world = enumerated.World()
        return world, enumerated.make_critics(world, self.critics.fitted, self.critics.best)

    def bench(self, on_search_prompts: bool = False) -> Rewards:
        """Models and prompts of training runs."""
        policies = {"tiny", "smollm2", *(["sums"] if any("sums" in grid.rewards for grid in self.grids) else [])}
        models = Models(**self.model_dump(include=set(Models.model_fields)))
        return Rewards.of(models, policies, on_search_prompts)

    @cached_property
    def searched(self) -> pd.DataFrame:
        """The search for the methods without a chosen rate."""
        methods = [method for method in self.methods if self.chosen_rates.get(method) is None]
        runs = search_runs(self, self.grids[0], methods)
        return self.run_all(self.bench(on_search_prompts=True), runs)

    @cached_property
    def rates(self) -> dict[str, float]:
        """Method to learning rate."""
        return self.chosen_rates | chosen_rates(self.searched, SEARCH_KL)

    @cached_property
    def trained_runs(self) -> pd.DataFrame:
        """All runs of the grids: every method on every reward at every target for KL, seed by seed."""
        return _all(self.run_all(self.bench(), grid_runs(self, grid, self.rates)) for grid in self.grids)

    def explained_subjects(self) -> Iterator[tuple[Subject, list[int]]]:
        """Every policy untrained, then trained, with the sizes of its fits."""
        for policy, of in self.explained.items():
            yield load_subject(self, policy, of.rewards), of.sizes
            if of.adapter:
                yield load_subject(self, policy, of.rewards, of.adapter), of.sizes
            if of.trained_on:  # as the first grid has it
                run = make_run(self, self.grids[0], of.trained_on, "auto", self.headline_kl, 0, self.rates["auto"])
                bench = self.bench()
                train_once(bench, replace(run, policy=policy))
                yield load_subject(self, policy, of.rewards, trained=bench.loaded[policy].backbone), of.sizes


def _all(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(list(tables), ignore_index=True)


def _worth(s: Settings) -> Iterator[pd.DataFrame]:
    for sizes in s.worth:
        subject = load_subject(s, sizes.policy, sizes.rewards)
        yield worth_table(subject, sizes, gradient_rows(subject, sizes))


TABLES = {
    "exact": lambda s: enumerated.exact_table(*s.enumerated),
    "bias": lambda s: enumerated.bias_table(*s.enumerated, s.critics.samples, s.critics.steps),
    "law": lambda s: enumerated.law_table(s.critics.shares, s.critics.scales, n=s.critics.best),
    "explained": lambda s: _all(explained.explained_table(subject, sizes, s.explained_families)
                                for subject, sizes in s.explained_subjects()),
    "worth": lambda s: _all(_worth(s)),
    "tokens": lambda s: _all(explained.liked_tokens(load_subject(s, policy, [reward]), s.tokens_completions)
                             for policy, rewards in s.tokens.items() for reward in rewards),
    "search": lambda s: s.searched.drop(columns="seconds"),
    "runs": lambda s: s.trained_runs.drop(columns="seconds"),
}  # fmt: skip
TIMED = {
    "run_seconds": lambda s: s.trained_runs[[*NAMES, "step", "seconds"]],
    "fit_cost": lambda s: _all(
        explained.fit_cost(load_subject(s, policy, ["sums" if policy == "sums" else "gold"]), batch, s.cost_completions)
        for policy, batch in s.cost.items()
    ),
}
