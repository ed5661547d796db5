"""The tables of the experiment on any reward, and the settings that they depend on.

What is measured is imported where it is used: `grade.experiments.any_reward.measure.worth` lies on top of all others.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import pandas as pd
from pydantic import Field, model_validator

from grade.config import Config
from grade.errors import InputError
from grade.experiments.measured import Measurements as Base

if TYPE_CHECKING:
    from grade.experiments.any_reward.measure.enumerated import World
    from grade.experiments.any_reward.measure.rewards import Folders
    from grade.experiments.any_reward.measure.runs import Run, Shared
    from grade.experiments.any_reward.measure.subject import Subject
    from grade.gradients.distilled.store import Fit
    from grade.models.backbone import Backbone

Policy = Literal["tiny", "smollm2", "sums"]


class Grid(Config):
    """Training runs: every method on every reward at every target for KL, seed by seed."""

    policy: Policy = Field("tiny", description="policy of all rewards but sums, which has its own")
    rewards: list[str] = Field(min_length=1, description="rewards; the policy of sums is trained on sums")
    methods: list[str] = Field(min_length=1, description="methods; those that a reward does not allow are left out")
    target_kls: list[float] = Field([10.0], min_length=1, description="in nats a completion")
    seeds: list[int] = Field([0, 1], min_length=1, description="one run of each method and target each")
    completions: int = Field(32, ge=2, description="a step")
    steps: int = Field(40, ge=1, description="optimizer steps")
    rate_factor: float = Field(1.0, gt=0, description="times the learning rates that were chosen")
    eval_every: int = Field(5, ge=1, description="steps between evaluations")
    eval_prompts: int = Field(128, ge=2, description="held-out prompts of an evaluation")


class Gradients(Config):
    """Gradients whose samples are weighed."""

    policy: Policy = Field("tiny", description="policy")
    rewards: list[str] = Field(min_length=1, description="its rewards")
    families: list[str] = Field(["counts", "bag"], min_length=1, description="families")
    fitted: list[int] = Field([16], min_length=1, description="completions N that a reward is distilled from")
    prompts: int = Field(16, ge=1, description="prompts B of a batch of gradients")
    rows: int = Field(6, ge=3, description="batches")
    reference: int = Field(
        3, ge=1, description="batches of rloo that the truth of each row is the mean of, its own too"
    )
    batches: list[int] = Field([1, 64], min_length=1, description="batch sizes n at which worth is told")


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
    group: int = Field(4, ge=2, description="G, completions of a prompt")
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
    finished_dir: str = Field("", description="folder of a runs.jsonl, read instead of training; empty: trained here")
    grids: list[Grid] = Field([SMOKE], min_length=1, description="training runs")
    chosen_rates: dict[str, float] = Field(
        {"rloo": 1.0e-2, "auto": 1.0e-2, "plug_in": 1.0e-2, "ste": 1.0e-2},
        description="method to learning rate, of an earlier search; the others are searched",
    )
    searched_rates: list[float] = Field(
        [3.0e-3, 6.0e-3, 1.0e-2, 2.0e-2], min_length=1, description="grid of that search"
    )
    search_kl: float = Field(10.0, gt=0, description="its target for KL, in nats a completion")
    headline_kl: float = Field(2.0, gt=0, description="target for KL of the figures of samples; one of the grids'")
    kl_levels: list[float] = Field([0.5, 1.0], min_length=1, description="KL at which rewards are compared")
    headline_level: float = Field(1.0, gt=0, description="one of kl_levels: that of the paired figures")
    cost: dict[Policy, int] = Field({"tiny": 8}, description="policies on which a step is timed: completions a step")
    cost_completions: int = Field(64, ge=8, description="completions in the store then")
    cost_steps: int = Field(2, ge=1, description="timed steps")
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

    @property
    def searched(self) -> list[str]:
        """Methods without a chosen rate."""
        return [method for method in self.methods if method not in self.chosen_rates]

    def folders(self, policy: str) -> Folders:
        """Where a policy's rewards lie."""
        from grade.experiments.any_reward.measure.rewards import Folders

        if policy == "sums":
            return Folders()
        of_tiny = policy == "tiny"
        return Folders(
            self.tiny_rewards_dir if of_tiny else self.smollm2_rewards_dir, self.reviews_dir, self.gold_file,
            self.smollm2_dir if of_tiny else "", self.smollm2_rewards_dir if of_tiny else "",
        )  # fmt: skip


class Measurements(Base[Settings]):
    """Distilled rewards: bias, what they explain, what a sample is worth, and training runs at equal KL."""

    Settings = Settings
    tables = ("exact", "bias", "law", "explained", "worth", "tokens", "search", "runs")
    timed = ("run_seconds", "fit_cost")

    # ---- the enumerated policy ----
    @cached_property
    def _critics(self) -> tuple[World, dict[str, Fit]]:
        from grade.experiments.any_reward.measure.enumerated import make_critics, make_world

        world = make_world()
        return world, make_critics(world, self.settings.critic_fitted, self.settings.critic_best)

    def exact(self) -> pd.DataFrame:
        """Bias and variance of every estimator with every critic; see `enumerated.exact_table`."""
        from grade.experiments.any_reward.measure.enumerated import exact_table

        return exact_table(*self._critics)

    def bias(self) -> pd.DataFrame:
        """Bias of the corrected form with the learner's own sampler; see `enumerated.bias_table`."""
        from grade.experiments.any_reward.measure.enumerated import bias_table

        return bias_table(*self._critics, self.settings.bias_samples, self.settings.bias_steps)

    def law(self) -> pd.DataFrame:
        """Gain in variance against ``1 / (1 - R2)``; see `enumerated.law_table`."""
        from grade.experiments.any_reward.measure.enumerated import law_table

        return law_table(self.settings.law_shares, self.settings.law_scales, n=self.settings.critic_best)

    # ---- language models ----
    @cached_property
    def _sums(self) -> tempfile.TemporaryDirectory:
        """Where the policy of sums is made, once."""
        return tempfile.TemporaryDirectory()

    @property
    def _bases(self) -> dict[str, str]:
        bases = {"tiny": self.settings.tiny_dir, "smollm2": self.settings.smollm2_dir}
        s = self.settings
        asked = [*s.explained, *(g.policy for g in s.worth), *s.tokens, *s.cost]
        sums = "sums" in asked or any("sums" in grid.rewards for grid in self.settings.grids)
        return bases | ({"sums": str(Path(self._sums.name, "sums"))} if sums else {})

    def _subject(
        self, policy: str, rewards: Sequence[str], adapter: str = "", trained: Backbone | None = None
    ) -> Subject:
        from grade.experiments.any_reward.measure.subject import load_subject

        s = self.settings
        return load_subject(policy, self._bases[policy], s.folders(policy), adapter, rewards, s.prompt_tokens,
                            s.new_tokens, s.group, trained=trained)  # fmt: skip

    def _trained(self, policy: str) -> Backbone:
        """The policy after a run on its reward of `trained_on`, as the first grid has them."""
        from grade.experiments.any_reward.measure.runs import Run, train_once

        s, first = self.settings, self.settings.grids[0]
        shared = self._shared(first.eval_every, first.eval_prompts)
        train_once(shared, Run(policy, s.trained_on[policy], "auto", s.headline_kl, 0, self._rates["auto"],
                               first.completions, first.steps))  # fmt: skip
        return shared.loaded[policy].backbone

    def explained(self) -> pd.DataFrame:
        """R2 within prompts, out of sample; see `explained.explained_table`."""
        from grade.experiments.any_reward.measure.explained import explained_table

        s, parts = self.settings, []
        for policy, rewards in s.explained.items():
            subjects = [partial(self._subject, policy, rewards)]
            if policy in s.trained:
                subjects.append(partial(self._subject, policy, rewards, s.trained[policy]))
            if policy in s.trained_on:
                subjects.append(lambda p=policy, r=rewards: self._subject(p, r, trained=self._trained(p)))
            for subject in subjects:
                parts.append(explained_table(subject(), s.explained_sizes[policy], s.explained_families))
        return pd.concat(parts, ignore_index=True).drop(columns="seconds")

    def worth(self) -> pd.DataFrame:
        """What a sample of each estimator is worth; see `worth.worth_table`."""
        from grade.experiments.any_reward.measure.runs import DIFFERENTIABLE
        from grade.experiments.any_reward.measure.worth import Setting, gradient_rows, worth_table

        parts = []
        for g in self.settings.worth:
            smooth = [reward for reward in g.rewards if reward in DIFFERENTIABLE]
            subject = self._subject(g.policy, g.rewards)
            setting = Setting(subject, g.prompts, g.families, g.fitted, differentiable=smooth)
            parts.append(worth_table(gradient_rows(setting, g.rows, g.reference), g.batches))
        return pd.concat(parts, ignore_index=True)

    def tokens(self) -> pd.DataFrame:
        """Tokens that rewards like most and least; see `cost.liked_tokens`. Columns also policy, reward."""
        from grade.experiments.any_reward.measure.cost import liked_tokens

        s = self.settings
        return pd.concat(
            [liked_tokens(self._subject(policy, [reward]), s.tokens_completions)
             for policy, rewards in s.tokens.items() for reward in rewards], ignore_index=True,
        )  # fmt: skip

    # ---- training runs ----
    def _shared(self, eval_every: int = 5, eval_prompts: int = 128) -> Shared:
        from grade.experiments.any_reward.measure.runs import Shared

        s = self.settings
        values = {
            "max_prompt_length": s.prompt_tokens, "max_completion_length": s.new_tokens,
            "min_completion_length": s.new_tokens, "eval_steps": eval_every, "eval_prompts": eval_prompts,
            "final_eval_prompts": eval_prompts, "kl_eval_prompts": eval_prompts,
        }  # fmt: skip
        bases = self._bases
        return Shared(bases, {policy: s.folders(policy) for policy in bases}, s.reviews_dir, s.gold_file, values)

    @cached_property
    def _finished(self) -> pd.DataFrame:
        """Everything in the folder of finished runs.

        Raises:
            InputError: If there is nothing.
        """
        from grade.experiments.any_reward.measure.runs import FILE, read_table

        folder = self.settings.finished_dir
        table = read_table(folder)
        if table.empty:
            raise InputError("finished_dir", folder, f"a folder with a {FILE} of finished training runs")
        return table

    def _run_all(self, shared: Shared, runs: Sequence[Run]) -> pd.DataFrame:
        """Train the runs, or read them where there is a folder of finished ones: these and no others.

        Raises:
            InputError: If one of them is not among the finished ones.
        """
        from grade.experiments.any_reward.measure.runs import run_all
        from grade.experiments.any_reward.measure.training import finished

        if self.settings.finished_dir:
            return finished(self._finished, runs, self.settings.finished_dir)
        return run_all(shared, runs, processes=self.settings.processes)

    @cached_property
    def _search(self) -> tuple[dict[str, float], pd.DataFrame]:
        """Learning rates of the methods without a chosen one, and the evaluations of their search."""
        from grade.experiments.any_reward.measure.runs import COLUMNS, chosen_rates
        from grade.experiments.any_reward.measure.training import search_runs

        s = self.settings
        if not s.searched:
            return {}, pd.DataFrame(columns=list(COLUMNS))
        first = s.grids[0]
        runs = search_runs(s.searched, s.searched_rates, s.search_kl, first.policy, first.completions, first.steps)
        shared = replace(self._shared(first.eval_every, first.eval_prompts), on_search_prompts=True)
        table = self._run_all(shared, runs)
        return chosen_rates(table, s.search_kl), table

    @property
    def _rates(self) -> dict[str, float]:
        return self.settings.chosen_rates | self._search[0]

    @cached_property
    def _runs(self) -> pd.DataFrame:
        from grade.experiments.any_reward.measure.training import grid

        s, rates, parts = self.settings, self._rates, []
        for g in s.grids:
            own = {method: rates[method] * g.rate_factor for method in g.methods}
            runs = grid(g.rewards, g.target_kls, g.seeds, own, g.policy, g.methods, g.completions, g.steps)
            parts.append(self._run_all(self._shared(g.eval_every, g.eval_prompts), runs))
        return pd.concat(parts, ignore_index=True)

    def search(self) -> pd.DataFrame:
        """The search of learning rates along training; see `runs.COLUMNS`. Empty if all rates were chosen before."""
        from grade.experiments.any_reward.measure.training import untimed

        return untimed(self._search[1])

    def runs(self) -> pd.DataFrame:
        """All runs along training; see `runs.COLUMNS`."""
        from grade.experiments.any_reward.measure.training import untimed

        return untimed(self._runs)

    def run_seconds(self) -> pd.DataFrame:
        """Seconds of training at each evaluation, with what names it."""
        from grade.experiments.any_reward.measure.training import timed

        return timed(self._runs)

    def fit_cost(self) -> pd.DataFrame:
        """Seconds of the fit and of the whole step, the store being as full; see `cost.fit_cost`."""
        from grade.experiments.any_reward.measure.cost import fit_cost

        s = self.settings
        parts = [fit_cost(self._subject(policy, ["sums" if policy == "sums" else "gold"]), batch, s.cost_completions,
                          s.cost_steps) for policy, batch in s.cost.items()]  # fmt: skip
        return pd.concat(parts, ignore_index=True)
