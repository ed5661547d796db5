"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grade.gradients.methods import AUTO, FALLBACK, TEACHER, TILT
from grade.gradients.policy_gradient import GroupSettings, GRPOSettings

if TYPE_CHECKING:
    from grade.rewards.rewards import Rewards
    from grade.training.config import GradeConfig


class AutoSettings(GRPOSettings):
    """Settings of the methods that ``auto`` may stand for."""


def choose_method(config: GradeConfig, rewards: Rewards | None, teacher: bool) -> tuple[dict[str, str], str]:
    """The settings that ``auto`` stands for, with the reason in one line; ``teacher``: whether there is one too.

    A setting that only `grpo` has means `grpo`, so that a script for TRL's trainer does what it says.
    """
    if rewards is None:
        return {"method": TEACHER}, "there is a teacher and no reward, so the value of every token is known"
    given = config.model_fields_set
    if grpo := sorted(given & (GRPOSettings.model_fields.keys() - GroupSettings.model_fields.keys())):
        return {"method": "grpo"}, f"{grpo[0]} is a setting of grpo"
    if teacher:
        return {"method": FALLBACK}, "a teacher speaks to the adapter"
    if config.target_kl is None and not config.beta:
        return {"method": FALLBACK}, "without target_kl or beta nothing limits a token bias"
    why = f"{FALLBACK}; after a quarter of the steps a token bias, if it predicts the rewards of new completions"
    return {"method": TILT, "then": AUTO}, why
