"""The reward gradient of a training run as the update that a probe looks at."""

from __future__ import annotations

import torch

from grade.backbone import Backbone
from grade.engines import Objective
from grade.entropy.probe import Gradient
from grade.errors import InputError
from grade.methods import RELAXED, make_engine
from grade.prompts import PromptBatch
from grade.relaxation import tau_at
from grade.reward import RewardModel
from grade.train_config import TrainConfig


def reward_gradient(policy: Backbone, reward_model: RewardModel, config: TrainConfig, step: int = 0) -> Gradient:
    """A run's loss on the update's prompts: its method, relaxation, KL weight, and microbatch size.

    Args:
        policy: The policy.
        reward_model: The reward.
        config: The run.
        step: Its step, which tau depends on.

    Returns:
        A function of prompts and a generator that leaves the gradient in the parameters' ``.grad``.

    Raises:
        InputError: If the run's method is a policy gradient.
    """
    if not config.relaxed:
        raise InputError("method", config.method, "one that relaxes tokens; probe_config.update is a policy gradient")
    engine = make_engine(
        RELAXED[config.method].engine, config.hops, config.hop_tolerance, config.gradient_checkpointing
    )
    relaxation = config.relaxation(tau_at(step, config.tau_start, config.tau_end, config.tau_anneal_steps))
    objective = Objective(reward_model, config.kl_coef, config.reward_scope)

    def run(prompts: PromptBatch, generator: torch.Generator) -> None:
        for start in range(0, len(prompts), config.batch_size):
            rows = slice(start, start + config.batch_size)
            some = PromptBatch(prompts.ids[rows], prompts.mask[rows])
            engine(policy, some, objective, relaxation, generator, len(some) / len(prompts))

    return run
