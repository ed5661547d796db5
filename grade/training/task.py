"""What a policy is trained on: backbone, reward, judge, prompts."""

from __future__ import annotations

from dataclasses import dataclass

from grade.models.backbone import Backbone
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardModel


@dataclass
class Task:
    """Backbone, reward, judge and prompts of a run."""

    backbone: Backbone
    reward_model: RewardModel
    judge: GoldJudge | None
    train_prompts: list[str]
    validation_prompts: list[str]
