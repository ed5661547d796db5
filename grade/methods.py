"""Methods by name: a relaxed one is a choice of estimator and engine, a policy gradient one of baseline.

`OPTIONS` says which settings of a run belong to some methods only; `grade.train_config` refuses them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from grade.engines import Engine, checkpointed, replay, unrolled
from grade.relaxation import Estimator

RelaxedName = Literal["gumbel", "ste", "gumbel_rao", "reinmax", "gumbel_legacy", "ste_legacy"]
PolicyGradientName = Literal["reinforce", "rloo", "remax", "grpo", "ppo"]
MethodName = Literal[RelaxedName, PolicyGradientName]
EngineName = Literal["replay", "checkpointed", "unrolled"]


@dataclass(frozen=True)
class Method:
    """A training method that differentiates the reward through relaxed tokens.

    Attributes:
        estimator: How tokens are relaxed.
        engine: How the gradient is computed.
    """

    estimator: Estimator
    engine: EngineName


RELAXED: dict[str, Method] = {
    "gumbel": Method("gumbel", "replay"),
    "ste": Method("ste", "replay"),
    "gumbel_rao": Method("gumbel_rao", "replay"),
    "reinmax": Method("reinmax", "replay"),
    "gumbel_legacy": Method("gumbel", "unrolled"),
    "ste_legacy": Method("ste", "unrolled"),
}
POLICY_GRADIENTS: tuple[str, ...] = get_args(PolicyGradientName)
METHODS: tuple[str, ...] = (*RELAXED, *POLICY_GRADIENTS)
GROUPED = ("rloo", "grpo")
"""Methods whose baseline is made of the prompt's other completions."""

_SETTINGS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (tuple(RELAXED), ("hops", "hop_tolerance", "gumbel_topk", "support", "tau_start", "tau_end", "tau_anneal_steps")),
    (("gumbel", "ste", "gumbel_rao", "reinmax", *POLICY_GRADIENTS), ("gradient_checkpointing",)),
    (("gumbel_rao",), ("rao_draws",)),
    (POLICY_GRADIENTS, ("num_generations", "kl_estimator")),
    (("reinforce",), ("baseline_momentum",)),
    (("grpo", "ppo"), ("clip_epsilon", "epochs", "minibatches")),
    (("grpo",), ("normalize_std", "self_certainty_reward")),
    (("ppo",), ("gamma", "gae_lambda", "value_learning_rate", "value_clip", "whiten_advantages")),
]
OPTIONS: dict[str, tuple[str, ...]] = {option: methods for methods, options in _SETTINGS for option in options}
"""Settings that only some methods have, and those methods; any other setting is every method's."""


def make_engine(
    name: EngineName, hops: int = 2, tolerance: float = 0.0, gradient_checkpointing: bool = False
) -> Engine:
    """The engine of that name.

    Args:
        name: replay, checkpointed or unrolled.
        hops: Feedback hops of `replay`.
        tolerance: Early stop of `replay`.
        gradient_checkpointing: Layer checkpointing of `replay`.

    Returns:
        The engine.
    """
    if name == "replay":
        return partial(replay, hops=hops, tolerance=tolerance, gradient_checkpointing=gradient_checkpointing)
    return {"checkpointed": checkpointed, "unrolled": unrolled}[name]
