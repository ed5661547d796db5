"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from grade.gradients.methods import TEACHER, MethodConfig
from grade.gradients.policy_gradient import GroupSettings, GRPOSettings
from grade.rewards.rewards import Rewards


class AutoSettings(GRPOSettings):
    """Settings of the methods that ``auto`` may stand for."""


def choose_method(config: MethodConfig, rewards: Rewards | None, teacher: bool) -> tuple[str, str]:
    """The method, with the reason in one line; ``teacher``: whether there is one beside the rewards, or alone.

    A setting that only `grpo` has means `grpo`, so that a script for TRL's trainer does what it says.
    """
    if rewards is None:
        return TEACHER, "there is a teacher and no reward, so the value of every token is known"
    given = config.model_fields_set
    if grpo := sorted(given & (GRPOSettings.model_fields.keys() - GroupSettings.model_fields.keys())):
        return "grpo", f"{grpo[0]} is a setting of grpo"
    if all(part.kind == "bag" for part in rewards.parts) and not teacher and "num_generations" not in given:
        return "ste", "the reward reads the embedding table itself, so its own gradient needs the fewest samples"
    return "rloo", "it needs the reward's values only, and is unbiased"
