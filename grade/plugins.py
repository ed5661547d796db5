"""What is found by name or import path: capabilities that the core does not import."""

from __future__ import annotations

import importlib
from operator import attrgetter
from typing import Any, Literal


def import_object(path: str) -> Any:
    """The object that an import path ``package.module:name`` or ``package.module:Class.name`` names.

    >>> import_object("math:tau") == 2 * import_object("math:pi")
    True
    """
    module, _, name = path.partition(":")
    return attrgetter(name)(importlib.import_module(module))


REWARDS = {"hf": "grade.rewards.classifier:classifier_reward"}
"""Makers of rewards, by what stands before the colon of a reward's name."""
REWARD_FOLDER = "grade.rewards.model:load_reward"
"""Reads a folder that ``grade reward`` wrote."""
OWN_REWARDS = {"self_certainty": "grade.rewards.certainty:CertaintyReward"}
"""Rewards that a name alone stands for: the policy's own certainty."""
QUANTISED, QUANTISE_ON_META = "grade.models.quantised:make_exact", "grade.models.quantised:quantise_on_meta"
"""Makes a function of a base that bitsandbytes quantised; and such a base without data."""
JUDGE = "grade.rewards.gold:GoldJudge.load"
"""Reads the judge that training never sees."""
ESTIMATORS: dict[str, str] = {
    "gumbel": "grade.gradients.estimators:GumbelSoftmax",
    "ste": "grade.gradients.estimators:Estimator",
    "gumbel_rao": "grade.gradients.straight_through:RaoBlackwellised",
    "reinmax": "grade.gradients.straight_through:ReinMax",
    "st": "grade.gradients.straight_through:DenseStraightThrough",
}
"""Estimators by name, as import paths."""
Support = Literal["top_k", "perturbed_top_k"]
"""Supports of a relaxed token, see `grade.gradients.estimators`."""
