"""``method: auto``: the method that a reward calls for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grade.gradients.methods import AUTO, FALLBACK, TILT
from grade.gradients.settings import GroupSettings, GRPOSettings

if TYPE_CHECKING:
    from grade.training.config import GradeConfig


def choose_method(config: GradeConfig, others: bool) -> tuple[dict[str, str], str]:
    """The settings that ``auto`` stands for, with the reason in one line.

    ``others``: whether there is more to learn than a fixed reward of completions, or a sampler to take an adapter.
    A setting that only `grpo` has means `grpo`, so that a script for TRL's trainer does what it says.
    """
    given = config.model_fields_set
    if grpo := sorted(given & (GRPOSettings.model_fields.keys() - GroupSettings.model_fields.keys())):
        return {"method": "grpo"}, f"{grpo[0]} is a setting of grpo"
    if others:
        return {"method": FALLBACK}, "a token bias fits a fixed reward alone, and no server samples with it"
    if config.target_kl is None and not config.beta:
        return {"method": FALLBACK}, "without target_kl or beta nothing limits a token bias"
    why = f"{FALLBACK}; after a quarter or half of the steps a token bias, if it predicts new rewards"
    return {"method": TILT, "then": AUTO}, why
