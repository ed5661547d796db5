"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from grade.errors import InputError
from grade.gradients.distilled.learner import DistilledSettings
from grade.gradients.methods import AUTO, DISTILLED, MethodConfig
from grade.gradients.policy_gradient import GRPOSettings
from grade.rewards.rewards import Rewards


class AutoSettings(DistilledSettings, GRPOSettings):
    """Settings of the methods that ``auto`` may stand for."""


def choose_method(config: MethodConfig, rewards: Rewards, texts: bool, terms: bool) -> tuple[str, str]:
    """The method, with the reason in one line.

    A reward on the embedding table (`bag`) is differentiated itself, unless groups are asked for; others are distilled,
    and so is any beside further ``terms`` of the objective, or where scored texts are given. A setting that only `grpo`
    has means `grpo`, so that a script for TRL's trainer does what it says. `docs/methods.md` has the measurements
    behind the rest.
    """
    set_by_user = config.model_fields_set
    grpo, distilled = (
        sorted(set_by_user & (one.model_fields.keys() - other.model_fields.keys()))
        for one, other in ((GRPOSettings, DistilledSettings), (DistilledSettings, GRPOSettings))
    )
    if grpo and distilled:
        allowed = f"grpo, which has {grpo[0]}, or {DISTILLED}, which has {distilled[0]}"
        raise InputError("method", AUTO, allowed)
    if grpo:
        return "grpo", f"{grpo[0]} is a setting of grpo"
    if texts:
        return DISTILLED, "scored texts are given, which it is distilled from before the first step"
    if terms:
        return DISTILLED, "beside further terms of the objective the reward's values are enough"
    shallow = all(part.kind == "bag" for part in rewards.parts)
    if shallow and not distilled and "num_generations" not in set_by_user:
        return "ste", "the reward reads the embedding table itself, so its own gradient needs the fewest samples"
    without = [part for part in rewards.parts if part.differentiable is None]
    if without:
        return DISTILLED, f"reward {without[0].name!r} gives values only, so a gradient is distilled from them"
    return DISTILLED, "the reward has a gradient, but through a transformer one distilled from its values trains better"
