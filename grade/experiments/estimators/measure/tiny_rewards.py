"""Random reward models, on a policy too small for trained ones."""

from __future__ import annotations

import torch

from grade.models.backbone import Backbone
from grade.rewards.model import HeadSettings, RewardModel

_HEAD_SCALE = 4.0  # weights of a random head are small: rewards would hardly differ between completions


def tiny_rewards(policy: Backbone, seed: int = 0) -> dict[str, RewardModel]:
    """Random reward models ``bag`` and ``trunk`` on a policy's own base."""
    found = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for kind in ("bag", "trunk"):
            model = RewardModel(kind, policy, HeadSettings(dropout=0.0))
            with torch.no_grad():
                model.head[-1].weight.mul_(_HEAD_SCALE)
            found[kind] = model.requires_grad_(False)
    return found
