"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grade.gradients.methods import DISTILLED

if TYPE_CHECKING:
    from grade.gradients.methods import MethodConfig
    from grade.gradients.objective import Objective


def choose_method(config: MethodConfig, objective: Objective) -> tuple[str, str]:
    """The method for a reward, with the reason in one line.

    Args:
        config: Settings.
        objective: The reward.

    Returns:
        Name and reason.
    """
    if config.self_certainty_reward:
        return "grpo", "self-certainty is the reward"
    return DISTILLED, "placeholder"
