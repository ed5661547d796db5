"""Methods by name: a relaxed one is a choice of estimator and engine, a policy gradient one of baseline.

`OPTIONS` says which settings of a run belong to some methods only; `grade.training.config` refuses them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from grade.config import Config
from grade.gradients.estimators import Estimator

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


class PolicyGradientConfig(Config):
    """Settings of a policy gradient; a training run adds the relaxed methods' and its own."""

    method: MethodName = Field(
        "ste",
        description="gumbel, ste, gumbel_rao, reinmax: the replay engine; *_legacy: the original's; reinforce, rloo, "
        "remax, grpo, ppo: policy gradients. A setting of some methods only is refused with the others",
    )
    batch_size: int = Field(
        8, ge=1, description="completions in a microbatch, B, of B / num_generations prompts (relaxed methods: of B)"
    )
    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")
    min_new_tokens: int = Field(8, ge=0, description="end-of-sequence is not sampled before this many tokens")
    gradient_checkpointing: bool = Field(
        False, description="recompute layers in backward (replay engine, policy gradients)"
    )


    num_generations: int | None = Field(
        None,
        ge=1,
        description="policy gradients: completions of each prompt, G; null: 4 with a group baseline "
        "(rloo, grpo), else 1",
    )
    kl_estimator: Literal["exact", "k3"] = Field(
        "exact", description="policy gradients: KL over the full vocabulary, or estimated from the sampled token"
    )
    baseline_momentum: float = Field(0.9, ge=0, lt=1, description="reinforce: momentum of the baseline over steps")
    clip_epsilon: float = Field(0.2, gt=0, lt=1, description="grpo, ppo: clip range of the probability ratio")
    epochs: int | None = Field(
        None,
        ge=1,
        description="grpo, ppo: passes over a step's completions; null: 4 for ppo, 1 for grpo (where nothing clips)",
    )
    minibatches: int = Field(
        1, ge=1, description="grpo, ppo: updates in a pass; each takes an equal share of every microbatch"
    )
    normalize_std: bool = Field(
        False, description="grpo: divide advantages by the group's standard deviation, as published; biased"
    )
    self_certainty_reward: bool = Field(
        False, description="grpo: the completion's self-certainty is the reward (Intuitor)"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="ppo: discount; 1 is the objective of the other methods")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="ppo: lambda of generalised advantage estimation")
    value_learning_rate: float = Field(1e-3, gt=0, description="ppo: AdamW learning rate of the value head")
    value_clip: float = Field(0.2, gt=0, description="ppo: clip range of the value, in units of reward")
    whiten_advantages: bool = Field(True, description="ppo: whiten the advantages of a step")

    @property
    def group(self) -> int:
        """G, completions of each prompt in a microbatch."""
        return self.num_generations or (4 if self.method in GROUPED else 1)

    @property
    def passes(self) -> int:
        """Passes of the update over a step's completions."""
        return self.epochs or (4 if self.method == "ppo" else 1)

    @property
    def batch_prompts(self) -> int:
        """Prompts in a microbatch."""
        return self.batch_size // self.group

    @property
    def batch_completions(self) -> int:
        """Completions generated and scored for a microbatch; remax's greedy ones are among them."""
        return self.batch_size + (self.batch_prompts if self.method == "remax" else 0)
