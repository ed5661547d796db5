"""Methods by name: a relaxed one is an estimator with an engine, a policy gradient a row of `PolicyGradientMethod`.

`OPTIONS` lists the settings that only some methods have; `grade.training.config` rejects them for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.gradients import losses
from grade.gradients.estimators import ESTIMATORS

EngineName = Literal["replay", "checkpointed", "unrolled"]


@dataclass(frozen=True)
class Method:
    """A training method that differentiates the reward through relaxed tokens.

    Attributes:
        estimator: How tokens are relaxed.
        engine: How the gradient is computed.
    """

    estimator: str
    engine: EngineName


RELAXED: dict[str, Method] = {name: Method(name, "replay") for name in ESTIMATORS} | {
    f"{name}_legacy": Method(name, "unrolled") for name, estimator in ESTIMATORS.items() if not estimator.redraws
}


@dataclass(frozen=True)
class Returns:
    """Inputs of an advantage of whole completions.

    Attributes:
        grouped: Penalised returns [N, G].
        config: Settings of the method.
        earlier: Mean return of each earlier step, oldest first.
        greedy: Samples each prompt's greedy completion and returns its penalised return [N].
    """

    grouped: Tensor
    config: PolicyGradientConfig
    earlier: Sequence[float]
    greedy: Callable[[], Tensor]


@dataclass(frozen=True)
class PolicyGradientMethod:
    """A policy gradient.

    Attributes:
        advantage: Advantages [N, G] of whole completions; None: token by token, from the value head.
        options: Settings that only this method reads.
        grouped: Whether the baseline is the mean of the prompt's other completions.
        clipped: Whether the loss is the clipped surrogate, which several updates per step need.
        value_head: Whether it learns a value function.
        greedy: Whether it samples a greedy completion of each prompt as well.
        running_mean: Whether the baseline is an average of earlier steps' returns.
        passes: Passes over a step's completions unless the settings say otherwise.
    """

    advantage: Callable[[Returns], Tensor] | None
    options: tuple[str, ...] = ()
    grouped: bool = False
    clipped: bool = False
    value_head: bool = False
    greedy: bool = False
    running_mean: bool = False
    passes: int = 1


POLICY_GRADIENT_METHODS: dict[str, PolicyGradientMethod] = {
    "reinforce": PolicyGradientMethod(
        lambda r: r.grouped - losses.ema_baseline(r.earlier, r.config.baseline_momentum),
        ("baseline_momentum",), running_mean=True,
    ),
    "rloo": PolicyGradientMethod(lambda r: losses.rloo(r.grouped), grouped=True),
    "remax": PolicyGradientMethod(lambda r: losses.remax(r.grouped, r.greedy()), greedy=True),
    "grpo": PolicyGradientMethod(
        lambda r: losses.grpo(r.grouped, r.config.normalize_std),
        ("normalize_std", "self_certainty_reward"), grouped=True, clipped=True,
    ),
    "ppo": PolicyGradientMethod(
        None, ("gamma", "gae_lambda", "value_learning_rate", "value_clip", "whiten_advantages"),
        clipped=True, value_head=True, passes=4,
    ),
}  # fmt: skip
POLICY_GRADIENTS: tuple[str, ...] = tuple(POLICY_GRADIENT_METHODS)
METHODS: tuple[str, ...] = (*RELAXED, *POLICY_GRADIENTS)
GROUPED: tuple[str, ...] = tuple(name for name, method in POLICY_GRADIENT_METHODS.items() if method.grouped)
"""Methods whose baseline is the mean of the prompt's other completions."""

RelaxedName = Literal[tuple(RELAXED)]
PolicyGradientName = Literal[POLICY_GRADIENTS]
MethodName = Literal[METHODS]


def _options() -> dict[str, tuple[str, ...]]:
    replayed = tuple(name for name, method in RELAXED.items() if method.engine == "replay")
    clipped = tuple(name for name, method in POLICY_GRADIENT_METHODS.items() if method.clipped)
    rows: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
        (
            tuple(RELAXED),
            ("hops", "hop_tolerance", "gumbel_topk", "support", "tau_start", "tau_end", "tau_anneal_steps"),
        ),
        ((*replayed, *POLICY_GRADIENTS), ("gradient_checkpointing",)),
        *(((name,), estimator.options) for name, estimator in ESTIMATORS.items()),
        (POLICY_GRADIENTS, ("num_generations", "kl_estimator")),
        (clipped, ("clip_epsilon", "epochs", "minibatches")),
        *(((name,), method.options) for name, method in POLICY_GRADIENT_METHODS.items()),
    ]
    return {option: methods for methods, options in rows for option in options}


OPTIONS: dict[str, tuple[str, ...]] = _options()
"""Settings that only some methods have, with those methods. Any other setting applies to every method."""


class PolicyGradientConfig(Config):
    """Settings of a policy gradient; `TrainConfig` adds those of relaxed methods and of a run."""

    method: MethodName = Field(
        "ste",
        description=f"{', '.join(ESTIMATORS)}: the replay engine; *_legacy: the original's; "
        f"{', '.join(POLICY_GRADIENTS)}: policy gradients. A setting that a method does not have is an error",
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
        description="grpo, ppo: passes over a step's completions; null: 4 for ppo, 1 for grpo (no clipping then)",
    )
    minibatches: int = Field(
        1, ge=1, description="grpo, ppo: updates per pass; each uses an equal share of every microbatch"
    )
    normalize_std: bool = Field(
        False, description="grpo: divide advantages by the group's standard deviation, as published; biased"
    )
    self_certainty_reward: bool = Field(
        False, description="grpo: the completion's self-certainty is the reward (Intuitor)"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="ppo: discount; 1 gives the same objective as the other methods")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="ppo: lambda of generalised advantage estimation")
    value_learning_rate: float = Field(1e-3, gt=0, description="ppo: AdamW learning rate of the value head")
    value_clip: float = Field(0.2, gt=0, description="ppo: clip range of the value, in units of reward")
    whiten_advantages: bool = Field(True, description="ppo: whiten the advantages of a step")

    @property
    def policy_gradient(self) -> PolicyGradientMethod | None:
        """The method's row, if it is a policy gradient."""
        return POLICY_GRADIENT_METHODS.get(self.method)

    @property
    def group(self) -> int:
        """G, completions of each prompt in a microbatch."""
        return self.num_generations or (4 if self.method in GROUPED else 1)

    @property
    def passes(self) -> int:
        """Passes of the update over a step's completions."""
        return self.epochs or (self.policy_gradient.passes if self.policy_gradient else 1)

    @property
    def batch_prompts(self) -> int:
        """Prompts in a microbatch."""
        return self.batch_size // self.group

    @property
    def batch_completions(self) -> int:
        """Completions generated and scored for a microbatch, greedy ones included."""
        greedy = self.policy_gradient is not None and self.policy_gradient.greedy
        return self.batch_size + (self.batch_prompts if greedy else 0)
