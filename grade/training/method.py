"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grade.errors import InputError
from grade.gradients.methods import DISTILLED, OPTIONS, reads

if TYPE_CHECKING:
    from grade.gradients.methods import MethodConfig
    from grade.gradients.objective import Objective


def choose_method(config: MethodConfig, objective: Objective) -> tuple[str, str]:
    """The method for a reward, with the reason in one line.

    A reward on the embedding table (`bag`) is differentiated itself, unless groups are asked for; others are distilled.
    A setting that only `grpo` has means `grpo`, so that a script for TRL's trainer does what it says. `docs/methods.md`
    has the measurements behind the rest.

    Args:
        config: Settings.
        objective: The reward.

    Returns:
        Name and reason.

    Raises:
        InputError: If settings of both methods are given.
    """
    own = {method: _own_settings(config, method) for method in ("grpo", DISTILLED)}
    if own["grpo"] and own[DISTILLED]:
        allowed = f"grpo, which has {own['grpo'][0]}, or {DISTILLED}, which has {own[DISTILLED][0]}"
        raise InputError("method", config.method, allowed)
    if own["grpo"]:
        return "grpo", f"{own['grpo'][0]} is a setting of grpo"
    shallow = all(part.kind == "bag" for part in objective.reward_model.parts)
    if shallow and not own[DISTILLED] and config.num_generations is None:
        return "ste", "the reward reads the embedding table itself, so its own gradient needs the fewest samples"
    without = [part for part in objective.reward_model.parts if part.differentiable is None]
    if without:
        return DISTILLED, f"reward {without[0].name!r} gives values only, so a gradient is distilled from them"
    return DISTILLED, "the reward has a gradient, but through a transformer one distilled from its values trains better"


def _own_settings(config: MethodConfig, method: str) -> list[str]:
    """Non-default settings that only this candidate reads."""
    other = "grpo" if method == DISTILLED else DISTILLED
    return [
        option for option in OPTIONS
        if reads(method, option) and not reads(other, option) and getattr(config, option) != config.default_of(option)
    ]  # fmt: skip
