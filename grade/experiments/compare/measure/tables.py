"""The tables of the comparison, and the settings that they depend on."""

from functools import cached_property
from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from grade.config import Config
from grade.errors import InputError
from grade.experiments.compare.measure import defects, runs
from grade.experiments.measured import Positive, Seeds, Several, Size
from grade.experiments.setting import kl_at_start, make_setting
from grade.experiments.training_runs import Run, sizes, train_all
from grade.gradients.methods import MethodName, Rate

SEARCH_SEED = 100
"""Seed of the search of learning rates, which the comparison does not use."""


class Settings(Config):
    """Models, methods and sizes of the comparison."""

    backbone_dir: str = ""  # folder of the language model; empty: the toy task
    reward_dir: str = ""  # folder of the reward model that all methods train on
    gold_file: str = ""  # the gold judge
    reviews_dir: str = ""  # folder of the review splits
    methods: list[MethodName] = Field(["ste", "gumbel", "reinforce", "ppo"], min_length=1)  # methods that are compared
    betas: list[float] = Field([0.05], min_length=1)  # weights of KL, in reward per nat and token
    headline_beta: float = 0.05  # the weight of KL at which ends of runs are tabled; one of betas
    seeds: Seeds = Field([0, 1], min_length=2)  # one run of each method and beta each
    kl_levels: list[Positive] = Field([0.05, 0.2], min_length=1)  # KL of the table, nats per completion
    headline_level: float = 0.05  # KL of the verdicts; one of kl_levels
    learning_rates: list[Rate] = Field([1.0e-2], min_length=1)  # grid of the search; one: no search
    # method to learning rate, of an earlier search; the others are searched
    chosen_rates: dict[MethodName, Rate] | None = None
    max_steps: Size = 4  # optimizer steps of a run
    completions: Several = 8  # completions a step, greedy ones included
    prompt_tokens: Size = 6  # P
    new_tokens: Size = 8  # T, the length of every completion
    support_size: int = Field(16, ge=0)  # K of the relaxed methods
    eval_every: Size = 2  # steps between evaluations
    eval_prompts: Several = 32  # held-out prompts of an evaluation
    final_eval_prompts: Several = 64  # held-out prompts before and after
    gradient_repetitions: Several = 4  # repeated gradients at fixed weights
    processes: Size = 1  # worker processes of one thread each

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.headline_beta not in self.betas:
            raise InputError("headline_beta", self.headline_beta, f"one of betas = {self.betas}")
        if self.headline_level not in self.kl_levels:
            raise InputError("headline_level", self.headline_level, f"one of kl_levels = {self.kl_levels}")
        return self

    @cached_property
    def bench(self) -> runs.Comparison:
        """Models and prompts of all runs."""
        return runs.Comparison({"policy": self.backbone_dir}, self.gold_file, self.reviews_dir)

    def run(self, method: str, beta: float, seed: int, learning_rate: float) -> Run:
        """One run."""
        values = sizes(self.prompt_tokens, self.new_tokens, self.completions, self.max_steps, self.eval_every,
                       self.eval_prompts)  # fmt: skip
        values |= {"gumbel_topk": self.support_size, "final_eval_prompts": self.final_eval_prompts}
        return runs.make_run(method, beta, seed, learning_rate, values, self.reward_dir)

    @cached_property
    def trained(self) -> dict[str, pd.DataFrame]:
        """Tables of all runs: what was ``searched``, evaluations (``curves``) and ends of runs (``finals``)."""
        chosen = self.chosen_rates or {}
        tried = [self.run(method, self.headline_beta, SEARCH_SEED, rate)
                 for method in self.methods if method not in chosen for rate in self.learning_rates]  # fmt: skip
        rates, searched = runs.search(self.bench, tried, self.processes)
        rates |= chosen
        plan = [self.run(method, beta, seed, rates[method])
                for seed in self.seeds for beta in self.betas for method in self.methods]  # fmt: skip
        curves, finals = train_all(self.bench, plan, self.processes)
        return dict(searched=searched, curves=curves[list(runs.CURVES)], finals=finals[list(runs.FINALS)])


def _defects(s: Settings) -> dict[str, float]:
    """The paper's defects on this task, each as a figure; ``loss_plus_reward`` with beta 0 and, to check, 1."""
    task = s.bench.task(s.run("ste", 0.0, s.seeds[0], 1e-3))
    setting = make_setting(task.backbone, task.reward_model, task.validation_prompts, 4, min(4, s.prompt_tokens),
                           s.new_tokens, s.support_size)  # fmt: skip
    start = kl_at_start(setting)
    figures = {"kl_aligned_max": start["kl_at_init_max"], "kl_late": start["kl_at_init_misaligned"]}
    for method in ("ste", "reinforce"):
        config = s.run(method, 0.0, 0, 1e-3).config
        rows, spread = defects.repeated_gradients(task, config, s.completions, s.gradient_repetitions)
        figures[f"spread_{method}"] = spread
        figures[f"relative_variance_{method}"] = defects.relative_variance(rows)
    lengths = dict(max_new_tokens=s.new_tokens, max_prompt_tokens=s.prompt_tokens, min_new_tokens=s.new_tokens)
    figures["scope_difference"] = defects.scope_difference(task, s.eval_prompts, **lengths)
    figures["loss_plus_reward"] = defects.loss_plus_reward(setting, beta=0.0)
    return figures | {"loss_plus_reward_with_kl": defects.loss_plus_reward(setting, beta=1.0)}


TABLES = {
    "searched": lambda s: s.trained["searched"],
    "untrained": lambda s: runs.untrained(s.bench, s.run("ste", 0.0, 0, 1e-3)),
    "curves": lambda s: s.trained["curves"],
    "finals": lambda s: s.trained["finals"],
    "defects": _defects,
}
TIMED = {}
