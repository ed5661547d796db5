"""The policy's own self-certainty as a reward (Intuitor; Zhao et al. 2025, arXiv:2505.19590)."""

from __future__ import annotations

import torch
from torch import Tensor

from grade.models.batch import PromptBatch
from grade.models.head import self_certainty
from grade.models.policy import Policy
from grade.models.scoring import predicting_hidden
from grade.rewards.base import Reward


class CertaintyReward(Reward):
    """``mean_t KL(uniform || policy)`` of a completion, in nats, under the policy as it is now."""

    name = "self_certainty"
    no_gradient = "the policy's self-certainty, which is a constant of the update"
    of_policy = True

    @torch.no_grad()
    def score(self, policy: Policy, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Of completions [B, T], which have at least one token; see `Reward.score`."""
        hidden = predicting_hidden(policy, prompts, ids)
        values = self_certainty(policy.head, hidden.flatten(0, 1)).view(mask.shape)
        return (values * mask).sum(-1) / mask.sum(-1)
