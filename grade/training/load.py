"""A training run's task, loaded from what its settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from grade.data.prompts import load_prompts
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.rewards.gold import GoldJudge
from grade.rewards.rewards import make_rewards
from grade.training.policy import place
from grade.training.task import Task

if TYPE_CHECKING:
    from grade.training.config import TrainConfig


def load_task(config: TrainConfig, device: str | torch.device = "cpu", adapter: str | None = None) -> Task:
    """Load backbone, rewards, judge and prompts of a run.

    Args:
        config: Names of files, folders, functions and hub ids.
        device: Where to put the models.
        adapter: Folder of an adapter to continue from, instead of a new one.

    Returns:
        The task.

    Raises:
        InputError: If something is missing or does not fit.
    """
    # A base that is divided is read on the CPU: no device need hold all of it.
    place_of = "cpu" if config.sharded else device
    backbone = Backbone.load(
        config.model, config.dtype, None if adapter else config.lora, adapter, place_of, config.attention, config.seed
    )
    if config.sharded:
        place(backbone, config)
    if config.relaxed:
        config.relaxation().check(backbone.vocab_size)
    rewards = make_rewards(config.reward, backbone, config.reward_weights, None, config.reward_scope)
    judge = GoldJudge.load(config.gold) if config.gold else None
    train = load_prompts(config.train_dataset)
    held_out = load_prompts(config.eval_dataset) if config.eval_dataset else []
    if held_out and config.final_eval_prompts and len(held_out) < config.final_eval_prompts:
        allowed = f"at most {len(held_out)}, the rows of {config.eval_dataset}"
        raise InputError("final_eval_prompts", config.final_eval_prompts, allowed)
    return Task(backbone, rewards, judge, train, held_out)
