"""The tables of the experiment on any reward, and the settings that they depend on."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import pandas as pd
from pydantic import Field, model_validator

from grade.config import Config
from grade.errors import InputError
from grade.experiments.any_reward.measure import enumerated, explained
from grade.experiments.any_reward.measure.rewards import DIFFERENTIABLE, Folders, Policy, Subject, load_subject
from grade.experiments.any_reward.measure.runs import (
    COLUMNS,
    DIFFERENTIATING,
    NAMES,
    SEARCH_KL,
    SEARCH_SEEDS,
    SEARCHED_RATES,
    Rewards,
    chosen_rates,
    make_run,
    published_runs,
    run_all,
)
from grade.experiments.any_reward.measure.sums import build_sums
from grade.experiments.any_reward.measure.worth import Gradients, gradient_rows, worth_table
from grade.experiments.training_runs import Run, train_once
from grade.models.backbone import Backbone


class Grid(Config):
    """Training runs: every method on every reward at every target for KL, seed by seed."""

    policy: Policy = Field("tiny", description="policy of all rewards but sums, which has its own")
    rewards: list[str] = Field(min_length=1, description="rewards; the policy of sums is trained on sums")
    methods: list[str] = Field(min_length=1, description="methods; those that a reward does not allow are left out")
    target_kls: list[float] = Field([10.0], min_length=1, description="in nats per completion")
    seeds: list[int] = Field([0, 1], min_length=1, description="one run of each method and target each")
    completions: int = Field(32, ge=2, description="a step")
    steps: int = Field(40, ge=1, description="optimizer steps")
    rate_factor: float = Field(1.0, gt=0, description="times the learning rates that were chosen")
    eval_every: int = Field(5, ge=1, description="steps between evaluations")
    eval_prompts: int = Field(128, ge=2, description="held-out prompts of an evaluation")


SMOKE = Grid(
    rewards=["rule", "trunk"], methods=["rloo", "auto", "plug_in", "ste"], target_kls=[2.0], completions=8, steps=3,
    eval_every=1, eval_prompts=8,
)  # fmt: skip


class Settings(Config):
    """Models, rewards and sizes."""

    tiny_dir: str = Field("", description="folder of the tiny language model; empty: the toy task's")
    tiny_rewards_dir: str = Field("", description="folder of its reward models")
    smollm2_dir: str = Field("", description="folder of SmolLM2, policy and other base of smollm2_trunk; empty: a toy")
    smollm2_rewards_dir: str = Field("", description="folder of its reward models")
    gold_file: str = Field("", description="the gold judge")
    reviews_dir: str = Field("", description="folder of the review splits")
    trained: dict[Policy, str] = Field({}, description="adapters of trained policies, for explained")
    trained_on: dict[Policy, str] = Field(
        {}, description="rewards on which policies are trained first, by the method auto, for explained"
    )
    prompt_tokens: int = Field(4, ge=1, description="P")
    new_tokens: int = Field(12, ge=1, description="T, the length of every completion")
    critic_fitted: int = Field(32, ge=8, multiple_of=4, description="completions of the fitted critics, enumerated")
    critic_best: int = Field(64, ge=8, multiple_of=4, description="completions of the others")
    bias_samples: int = Field(800, ge=160, multiple_of=8, description="completions drawn for each critic")
    bias_steps: int = Field(24, ge=20, description="draws of each whole step of the method")
    law_shares: list[float] = Field(
        [0.3, 0.8], min_length=1, description="shares of the reward that add up over tokens"
    )
    law_scales: list[float] = Field([0.0, 1.0], min_length=1, description="factors on the critic")
    explained: dict[Policy, list[str]] = Field({"tiny": ["trunk", "rule"]}, description="rewards of each policy")
    explained_sizes: dict[Policy, list[int]] = Field({"tiny": [16, 32]}, description="completions n")
    explained_families: list[str] = Field(["counts", "bag", "values"], description="families; empty: all")
    worth: list[Gradients] = Field(
        [Gradients(rewards=["trunk"], prompts=4, reference=2)],
        min_length=1,
        description="gradients whose samples are weighed",
    )
    tokens: dict[Policy, list[str]] = Field({"tiny": ["gold"]}, description="rewards whose tokens are shown")
    tokens_completions: int = Field(64, ge=8, description="completions that those rewards are distilled from")
    published: str = Field("", description="results in git whose training runs are not trained again; empty: all are")
    grids: list[Grid] = Field([SMOKE], min_length=1, description="training runs")
    chosen_rates: dict[str, float | None] = Field(
        {"rloo": 1.0e-2, "auto": 1.0e-2, "plug_in": 1.0e-2, "ste": 1.0e-2},
        description="method to learning rate, of an earlier search; the others, and those with null, are searched",
    )
    headline_kl: float = Field(2.0, gt=0, description="target for KL of the figures of samples; one of the grids'")
    kl_levels: list[float] = Field([0.5, 1.0], min_length=1, description="KL at which rewards are compared")
    headline_level: float = Field(1.0, gt=0, description="one of kl_levels: that of the paired figures")
    cost: dict[Policy, int] = Field({"tiny": 8}, description="policies on which a step is timed: completions a step")
    cost_completions: int = Field(64, ge=8, description="completions in the store then")
    processes: int = Field(1, ge=1, description="worker processes of one thread each, for training")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.headline_level not in self.kl_levels:
            raise InputError("headline_level", self.headline_level, f"one of kl_levels = {self.kl_levels}")
        targets = sorted({target for grid in self.grids for target in grid.target_kls})
        if self.headline_kl not in targets:
            raise InputError("headline_kl", self.headline_kl, f"one of the grids' target_kls = {targets}")
        if self.trained_on and "auto" not in (*self.methods, *self.chosen_rates):
            raise InputError("trained_on", self.trained_on, "nothing where no grid has the method auto")
        if twice := sorted(set(self.trained) & set(self.trained_on)):
            raise InputError(
                "trained_on", self.trained_on, f"other policies than trained; both name {', '.join(twice)}"
            )
        if missing := [policy for policy in self.explained if policy not in self.explained_sizes]:
            raise InputError("explained_sizes", list(self.explained_sizes), f"sizes for {', '.join(missing)} too")
        return self

    @property
    def methods(self) -> list[str]:
        """Methods of all grids."""
        return list(dict.fromkeys(method for grid in self.grids for method in grid.methods))

    # ---- the enumerated policy ----
    @cached_property
    def critics(self) -> tuple[enumerated.World, dict]:
        """The enumerated policy, and what is held against its reward."""
        world = enumerated.World()
        return world, enumerated.make_critics(world, self.critic_fitted, self.critic_best)

    # ---- language models ----
    @cached_property
    def folders(self) -> dict[str, Folders]:
        """Where each policy lies; that of sums is made where it is needed."""
        shared = (self.reviews_dir, self.gold_file)
        folders = {
            "tiny": Folders(self.tiny_dir, self.tiny_rewards_dir, *shared, self.smollm2_dir, self.smollm2_rewards_dir),
            "smollm2": Folders(self.smollm2_dir, self.smollm2_rewards_dir, *shared),
        }
        asked = [*self.explained, *(g.policy for g in self.worth), *self.tokens, *self.cost]
        if "sums" in asked or any("sums" in grid.rewards for grid in self.grids):
            folders["sums"] = Folders(str(Path(self.scratch.name, "sums")))
            build_sums(folders["sums"].base)
        return folders

    @cached_property
    def scratch(self) -> tempfile.TemporaryDirectory:
        """A folder that lives as long as these settings."""
        return tempfile.TemporaryDirectory()

    def subject(
        self, policy: str, rewards: Sequence[str], adapter: str = "", trained: Backbone | None = None
    ) -> Subject:
        """A policy with its rewards."""
        return load_subject(
            policy, self.folders[policy], rewards, self.prompt_tokens, self.new_tokens, adapter, trained
        )

    # ---- training runs ----
    def bench(self, on_search_prompts: bool = False) -> Rewards:
        """Models and prompts of training runs."""
        bases = {policy: folders.base for policy, folders in self.folders.items()}
        return Rewards(bases, self.gold_file, self.reviews_dir, on_search_prompts, self.folders)

    def run(self, grid: Grid, reward: str, method: str, target_kl: float, seed: int, rate: float) -> Run:
        """One run with the sizes of a grid."""
        values: dict[str, Any] = {
            "max_prompt_length": self.prompt_tokens, "max_completion_length": self.new_tokens,
            "min_completion_length": self.new_tokens, "max_steps": grid.steps, "eval_steps": grid.eval_every,
            "eval_prompts": grid.eval_prompts, "final_eval_prompts": grid.eval_prompts,
            "kl_eval_prompts": grid.eval_prompts,
        }  # fmt: skip
        policy = "sums" if reward == "sums" else grid.policy
        return make_run(policy, reward, method, target_kl, seed, rate, grid.completions, values)

    @cached_property
    def finished(self) -> pd.DataFrame:
        """Runs that are not trained again."""
        return published_runs(self.published) if self.published else pd.DataFrame(columns=list(COLUMNS))

    @cached_property
    def searched(self) -> pd.DataFrame:
        """The search for the methods without a chosen rate: each at every rate on one reward, with seeds of its own.

        The reward is one that is no function of embeddings, or, for `ste` and `st`, one that is.
        """
        smooth = {True: "trunk", False: "gold"}
        runs = [
            self.run(self.grids[0], smooth[method in DIFFERENTIATING], method, SEARCH_KL, seed, rate)
            for method in self.methods if self.chosen_rates.get(method) is None
            for rate in SEARCHED_RATES for seed in SEARCH_SEEDS
        ]  # fmt: skip
        if not runs:
            return pd.DataFrame(columns=list(COLUMNS))
        return run_all(self.bench(on_search_prompts=True), runs, self.finished, self.processes)

    @cached_property
    def rates(self) -> dict[str, float]:
        """Method to learning rate."""
        return self.chosen_rates | chosen_rates(self.searched, SEARCH_KL)

    @cached_property
    def trained_runs(self) -> pd.DataFrame:
        """All runs of the grids: every method on every reward at every target for KL, seed by seed."""
        parts = []
        for g in self.grids:
            runs = [
                self.run(g, reward, method, target, seed, self.rates[method] * g.rate_factor)
                for seed in g.seeds for target in g.target_kls for reward in g.rewards for method in g.methods
                if method not in DIFFERENTIATING or reward in DIFFERENTIABLE
            ]  # fmt: skip
            parts.append(run_all(self.bench(), runs, self.finished, self.processes))
        return pd.concat(parts, ignore_index=True)

    def train_first(self, policy: str) -> Backbone:
        """The policy after a run on its reward of `trained_on`, as the first grid has them."""
        run = self.run(self.grids[0], self.trained_on[policy], "auto", self.headline_kl, 0, self.rates["auto"])
        bench = self.bench()
        train_once(bench, replace(run, policy=policy))
        return bench.loaded[policy].backbone


def _explained_subjects(s: Settings) -> Iterator[Subject]:
    for policy, rewards in s.explained.items():
        yield s.subject(policy, rewards)
        if policy in s.trained:
            yield s.subject(policy, rewards, s.trained[policy])
        if policy in s.trained_on:
            yield s.subject(policy, rewards, trained=s.train_first(policy))


def _explained(s: Settings) -> pd.DataFrame:
    parts = [explained.explained_table(subject, s.explained_sizes[subject.policy], s.explained_families)
             for subject in _explained_subjects(s)]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def _worth(s: Settings) -> pd.DataFrame:
    parts = [worth_table(gradient_rows(s.subject(g.policy, g.rewards), g), g.batches) for g in s.worth]
    return pd.concat(parts, ignore_index=True)


def _tokens(s: Settings) -> pd.DataFrame:
    parts = [explained.liked_tokens(s.subject(policy, [reward]), s.tokens_completions)
             for policy, rewards in s.tokens.items() for reward in rewards]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


def _fit_cost(s: Settings) -> pd.DataFrame:
    parts = [explained.fit_cost(s.subject(policy, ["sums" if policy == "sums" else "gold"]), batch, s.cost_completions)
             for policy, batch in s.cost.items()]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


TABLES = {
    "exact": lambda s: enumerated.exact_table(*s.critics),
    "bias": lambda s: enumerated.bias_table(*s.critics, s.bias_samples, s.bias_steps),
    "law": lambda s: enumerated.law_table(s.law_shares, s.law_scales, n=s.critic_best),
    "explained": _explained,
    "worth": _worth,
    "tokens": _tokens,
    "search": lambda s: s.searched.drop(columns="seconds"),
    "runs": lambda s: s.trained_runs.drop(columns="seconds"),
}
TIMED = {
    "run_seconds": lambda s: s.trained_runs[[*NAMES, "step", "seconds"]],
    "fit_cost": _fit_cost,
}
