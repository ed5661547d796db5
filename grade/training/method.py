"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grade.gradients.methods import DISTILLED

if TYPE_CHECKING:
    from grade.gradients.objective import Objective


def choose_method(objective: Objective) -> tuple[str, str]:
    """The method for a reward, with the reason in one line.

    `docs/methods.md` has the measurements behind it.

    Args:
        objective: The reward.

    Returns:
        Name and reason.
    """
    without = [part for part in objective.parts if not callable(part)]
    if without:
        name = getattr(without[0], "name", type(without[0]).__name__)
        return DISTILLED, f"reward {name!r} gives values only, so a gradient is distilled from them"
    return DISTILLED, "the reward has a gradient, but one distilled from its values trains as well or better"
