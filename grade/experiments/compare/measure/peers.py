"""A peer on the same task: TRL's GRPOTrainer, with this project's model, prompts, reward, evaluation and sizes.

Its code path is its own (tokenising, generating with transformers, loss, optimizer loop); its arguments are in
`settings`. With ``black_box`` both trainers get the same reward function, of which only values can be seen. Each
contestant runs in a fresh process of one thread, so that seconds and peak memory are its own; evaluations do not count.

What cannot be made equal: TRL estimates KL from the sampled token (k3) where ours is exact, and its advantages are of
the reward alone where ours are of the penalised return. Its loss is a mean over tokens where ours is a sum, so its
beta is ours divided by T (AdamW does not see the common factor).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import pandas as pd
import torch
from peft import set_peft_model_state_dict
from pydantic import Field, model_validator
from torch import Tensor

from grade.config import SEEDS, Config
from grade.errors import InputError
from grade.experiments.compare.measure.runs import make_run
from grade.experiments.training_runs import Bench, Run, judged_by, sizes, train_once
from grade.experiments.trl_runs import Clock, alone, require_peer, same_settings, train_trl
from grade.gradients.methods import MethodName, Rate
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.prompts import encode_prompts, padded
from grade.results import peak_memory
from grade.rewards.base import Reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import load_reward
from grade.training.config import TrainConfig
from grade.training.load import Task
from grade.training.run import evaluate_task

PEER = "trl_grpo"
"""The peer's name in the tables."""


class PeersConfig(Config):
    """The contest: folders, the run, and who takes part."""

    model: str = Field("models/tiny", description="folder of the base model")
    reward: str = Field(
        "models/reward/tiny/bag", description="folder of the reward model; with black_box also a judge's file (.npz)"
    )
    black_box: bool = Field(False, description="ours get the reward as a function too, of which only values are seen")
    gold: str = Field("models/gold/judge.npz", description="the gold judge; empty for none")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    methods: list[MethodName] = Field(
        ["grpo", "ste"], min_length=1, description="ours; the first is the peer's match, the last is compared with it"
    )
    learning_rates: list[Rate] = Field([2e-3, 2e-3], min_length=1, description="of each; the peer has the first")
    beta: float = Field(0.1, ge=0, description="weight beta of KL, in reward per nat and token")
    seed: int = Field(0, ge=0, lt=SEEDS, description="seed of adapter, prompt order and noise")
    max_prompt_length: int = Field(12, ge=1, description="P")
    max_completion_length: int = Field(24, ge=1, description="T; completions have this length")
    gumbel_topk: int = Field(64, ge=0, description="size K of a relaxed token's support")
    per_device_train_batch_size: int = Field(32, ge=4, description="completions a step")
    max_steps: int = Field(40, ge=2, description="optimizer steps")
    eval_steps: int = Field(5, ge=1, description="evaluate every so many steps")
    eval_prompts: int = Field(256, ge=2, description="held-out prompts of an evaluation")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.methods[0] != "grpo":
            raise InputError("methods", self.methods, "grpo first: the peer's is that method")
        if len(self.methods) != len(self.learning_rates):
            raise InputError("learning_rates", self.learning_rates, f"one for each of {len(self.methods)} methods")
        if self.reward.endswith(".npz") and not self.black_box:
            raise InputError("black_box", False, f"true: a judge ({self.reward}) has no gradient")
        return self


@dataclass(frozen=True)
class FunctionBench(Bench):
    """The reward, of a model's folder or a judge's file, is a function that TRL's trainer takes too."""

    def reward(self, run: Run, backbone: Backbone) -> FunctionReward:
        """The function as a reward: `FunctionReward.function` is what the peer gets."""
        if run.reward.endswith(".npz"):
            return FunctionReward(judged_by(GoldJudge.load(run.reward)))
        return FunctionReward(_scored_by(load_reward(run.reward, backbone), backbone, run.values["max_prompt_length"]))


def _scored_by(reward: Reward, backbone: Backbone, prompt_length: int) -> Callable[..., list[float]]:
    """A reward of token ids as a function with TRL's signature; prompts are cut to P tokens."""

    @torch.no_grad()
    def score(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        batch = encode_prompts(backbone.tokenizer, prompts, prompt_length)
        return Objective(reward).score(backbone, batch, *padded(completion_ids)).tolist()

    return score


def settings(config: TrainConfig) -> dict[str, Any]:
    """Every setting that TRL's GRPOConfig is given, for a run of our `grpo`; all others keep TRL's defaults."""
    return same_settings(config) | {
        "epsilon": config.epsilon,
        "scale_rewards": config.scale_rewards,
        "num_generations": config.group,
        "num_iterations": config.passes,
        "beta": config.beta / config.max_completion_length,
        "loss_type": "grpo",
    }


def train_peer(bench: Bench, run: Run) -> list[dict[str, Any]]:
    """Train TRL's GRPOTrainer as `train_once` trains our ``grpo``; rows as its, the untrained policy first."""
    rows, config = [], run.config

    def evaluate(task: Task, step: int, seconds: float) -> None:
        found = evaluate_task(config, task, config.eval_prompts)
        rows.append({
            **run.names, "method": PEER, "step": step, "samples": step * config.batch_completions, "seconds": seconds,
            "reward": found.reward.mean(), "gold": found.gold.mean(),
            "kl": found.kl.mean() * config.max_completion_length,
        })  # fmt: skip

    train_grpo(bench, run, evaluate)
    return rows


Evaluate = Callable[[Task, int, float], None]
"""Takes the task with the current policy, the step and the seconds of training so far."""


def train_grpo(bench: Bench, run: Run, evaluate: Evaluate) -> None:
    """Train TRL's GRPOTrainer on a run's prompts and reward, with the arguments in `settings`."""
    from trl import GRPOConfig, GRPOTrainer

    config, task = run.config, bench.task(run)
    reward = task.reward_model
    if not isinstance(reward, FunctionReward):
        reward = FunctionReward(_scored_by(reward, task.backbone, config.max_prompt_length))
    tokens = encode_prompts(task.backbone.tokenizer, task.train_prompts, config.max_prompt_length)
    prompts = task.backbone.tokenizer.batch_decode(tokens.rows(), skip_special_tokens=True)
    make = partial(GRPOTrainer, reward_funcs=reward.function)
    train_beside(bench, run, task, make, partial(GRPOConfig, **settings(config)), {"prompt": prompts}, evaluate)


def train_beside(
    bench: Bench, run: Run, task: Task, trainer: Callable[..., Any], arguments: Callable[..., Any],
    columns: Mapping[str, Sequence[Any]], evaluate: Evaluate,
) -> None:  # fmt: skip
    """Train one of TRL's trainers on a dataset of these columns; `evaluate` sees the untrained policy first."""

    def observe(values: Mapping[str, Tensor], step: int, seconds: float) -> None:
        set_peft_model_state_dict(task.backbone.peft, dict(values))
        evaluate(task, step, seconds)

    with torch.random.fork_rng(devices=[]):
        evaluate(task, 0, 0.0)
    train_trl(bench.bases[run.policy], task.backbone.dtype, trainer, arguments, columns, Clock(run.config, observe))


def compare_peers(config: PeersConfig) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Evaluations of our runs and the peer's, each in a fresh process of one thread; their costs; TRL's settings.

    Seconds per sample are the mean: a median would hide a slow first step.
    """
    require_peer(PEER)
    values = sizes(config.max_prompt_length, config.max_completion_length, config.per_device_train_batch_size,
                   config.max_steps, config.eval_steps, config.eval_prompts)  # fmt: skip
    values["gumbel_topk"] = config.gumbel_topk
    bench = (FunctionBench if config.black_box else Bench)({"policy": config.model}, config.gold, config.reviews)
    runs = [make_run(method, config.beta, config.seed, rate, values, config.reward)
            for method, rate in zip(config.methods, config.learning_rates, strict=True)]  # fmt: skip
    curves, costs = [], []
    for run, peer in [*((run, False) for run in runs), (runs[0], True)]:
        rows, start, peak = alone(_contestant, bench, run, peer)
        curves += rows
        costs.append((rows[-1]["method"], rows[-1]["seconds"] / rows[-1]["samples"], peak, start))
    columns = ["method", "seconds_per_sample", "peak_bytes", "start_bytes"]
    theirs = settings(runs[0].config).items()
    theirs = {f"peer/settings/{k}": v if isinstance(v, int | float) else str(v) for k, v in theirs}
    return pd.DataFrame(curves), pd.DataFrame(costs, columns=columns), theirs


def _contestant(bench: Bench, run: Run, peer: bool) -> tuple[list[dict[str, Any]], int, int]:
    if peer:
        import trl.trainer.grpo_trainer  # noqa: F401  its imports are not training
    bench.task(run)
    start = peak_memory(torch.device("cpu"))
    rows = train_peer(bench, run) if peer else train_once(bench, run)[0]
    return rows, start, peak_memory(torch.device("cpu"))
