"""A teacher as a reward: the closer the policy's distributions are to its own, the higher."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden
from grade.models.teacher import Teacher
from grade.rewards.base import Reward, RewardScope
from grade.rewards.rewards import Rewards

if TYPE_CHECKING:
    from grade.models.backbone import Backbone


class TeacherReward(Reward):
    """``-mean_t D_t`` in nats per token, of the policy's divergence from a teacher along a completion."""

    name = "teacher"
    no_gradient = "a divergence of distributions, of which relaxed tokens have none"

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    @torch.no_grad()
    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Of completions [B, T] of the policy as it is now; see `Reward.score`."""
        states = self.teacher.hidden(prompts, ids, mask)
        each = self.teacher.divergence(predicting_hidden(policy, prompts, ids), states, mask)
        return -each.sum(1) / mask.sum(1)


def beside(rewards: Rewards | None, teacher: Teacher, scope: RewardScope, dtype: torch.dtype) -> Rewards:
    """The sum of rewards, if there are any, and of a teacher's with its weight."""
    parts, weights = ([], []) if rewards is None else (rewards.parts, rewards.weights)
    return Rewards([*parts, TeacherReward(teacher)], [*weights, teacher.weight], scope, dtype)
