"""A training run's task, loaded from the folders that its settings name."""

from __future__ import annotations

import torch

from grade.data.reviews import load_reviews
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.prompts import prompt_text
from grade.models.sampling import check_length
from grade.rewards.gold import GoldJudge
from grade.rewards.model import load_reward
from grade.training.config import TrainConfig
from grade.training.task import Task


def load_task(config: TrainConfig, device: str | torch.device, adapter: str | None = None) -> Task:
    """Load backbone, reward model, judge and prompts of a run.

    Args:
        config: Names of the folders.
        device: Where to put the models.
        adapter: Folder of an adapter to continue from, instead of a new one.

    Returns:
        The task.

    Raises:
        InputError: If a file is missing or does not fit.
    """
    backbone = Backbone.load(
        config.backbone, config.dtype, None if adapter else config.lora, adapter, device, config.attention, config.seed
    )
    if config.relaxed:
        config.relaxation(config.tau_start).check(backbone.vocab_size)
    check_length(backbone, config.max_prompt_tokens + config.max_new_tokens)
    reward_model = load_reward(config.reward, backbone).to(device)
    judge = GoldJudge.load(config.gold) if config.gold else None
    splits = [[prompt_text(r.text) for r in load_reviews(config.reviews, s)] for s in ("policy", "validation")]
    if len(splits[1]) < config.final_eval_prompts:
        allowed = f"at most {len(splits[1])}, the size of the validation split"
        raise InputError("final_eval_prompts", config.final_eval_prompts, allowed)
    return Task(backbone, reward_model, judge, *splits)
