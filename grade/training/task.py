"""What a policy is trained on: backbone, reward, judge, prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grade.models.backbone import Backbone
from grade.rewards.gold import GoldJudge

Prompts = Sequence[str] | Sequence[Mapping[str, Any]]


@dataclass
class Task:
    """What a run is trained on.

    Attributes:
        backbone: The policy.
        reward_model: The reward, anything that `grade.rewards.rewards.make_rewards` takes.
        judge: Scores texts in evaluations only.
        train_prompts: Texts, or rows of a dataset with a ``prompt``.
        validation_prompts: The same, held out.
    """

    backbone: Backbone
    reward_model: Any
    judge: GoldJudge | None
    train_prompts: Prompts
    validation_prompts: Prompts


def rows(prompts: Prompts) -> Sequence[Mapping[str, Any]]:
    """Prompts as rows of a dataset."""
    return [{"prompt": p} for p in prompts] if len(prompts) and isinstance(prompts[0], str) else prompts
