"""Methods by name: a relaxed one is an estimator with an engine, a policy gradient a row of `PolicyGradientMethod`.

`OPTIONS` lists the settings that only some methods read, `SWITCHES` those that only some values of another setting
read; `MethodConfig` rejects them for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
)

from grade.config import Settings, Text, check_bytes, setting
from grade.errors import InputError
from grade.gradients.estimators import ESTIMATORS, RelaxationConfig, Support, tau_at

EngineName = Literal["replay", "checkpointed", "unrolled"]


@dataclass(frozen=True)
class Method:
    """A training method that differentiates the reward through relaxed tokens."""

    estimator: str  # how tokens are relaxed
    engine: EngineName  # how the gradient is computed


RELAXED: dict[str, Method] = {name: Method(name, "replay") for name in ESTIMATORS} | {
    f"{name}_legacy": Method(name, "unrolled") for name, estimator in ESTIMATORS.items() if not estimator.redraws
}


@dataclass(frozen=True)
class PolicyGradientMethod:
    """A policy gradient."""

    grouped: bool = False  # whether the baseline is the mean of the prompt's other completions
    clipped: bool = False  # whether the loss is the clipped surrogate, which several updates per step need
    value_head: bool = False  # whether it learns a value function, from which advantages follow token by token
    greedy: bool = False  # whether it samples a greedy completion of each prompt as well
    running_mean: bool = False  # whether the baseline is an average of earlier steps' returns
    passes: int = 1  # passes over a step's completions unless the settings say otherwise


POLICY_GRADIENT_METHODS: dict[str, PolicyGradientMethod] = {
    "reinforce": PolicyGradientMethod(running_mean=True),
    "rloo": PolicyGradientMethod(grouped=True),
    "remax": PolicyGradientMethod(greedy=True),
    "grpo": PolicyGradientMethod(grouped=True, clipped=True),
    "ppo": PolicyGradientMethod(clipped=True, value_head=True, passes=4),
}
POLICY_GRADIENTS: tuple[str, ...] = tuple(POLICY_GRADIENT_METHODS)
DISTILLED = "distilled"
"""The method that differentiates a reward distilled from scored completions (`grade.gradients.distilled`)."""
OFFLINE = "offline"
"""The method that trains along scored text, without samples of the policy (`grade.gradients.distilled.offline`)."""
TEACHER = "teacher"
"""The method that learns a teacher's distributions alone (`grade.gradients.teacher`)."""
AUTO = "auto"
"""The trainer chooses the method from the reward (`grade.training.trainer`)."""
FAMILIES = ("counts", "bag")
"""What a distilled reward may be linear in, unless the settings say otherwise."""
HINTED = "hinted"
"""The family of what a teacher would rather say (`grade.gradients.distilled.families`)."""
METHODS: tuple[str, ...] = (*RELAXED, *POLICY_GRADIENTS, DISTILLED)
"""Methods that take any reward and sample; `OFFLINE` does not, `TEACHER` has none."""
GROUPED: tuple[str, ...] = (
    *(name for name, method in POLICY_GRADIENT_METHODS.items() if method.grouped), DISTILLED,
)  # fmt: skip
"""Methods whose baseline is the mean of the prompt's other completions."""

TAU_RANGE = (1e-4, 1e6)
"""Usable temperatures, of the Gumbel softmax and of sampling.

Softmax weights below ``exp(-104)`` are 0 in float32, so a position has a gradient only if its two largest values lie
within ``104 tau`` of each other: at 1e-4 one position in a hundred. The gradient falls as ``1/tau``: above 1e6 it is
less than the 1e-8 that AdamW adds to its root mean square, and the steps vanish.
"""

MethodName = Literal[METHODS + (OFFLINE, TEACHER, AUTO)]


_CLIPPED = tuple(name for name, method in POLICY_GRADIENT_METHODS.items() if method.clipped)
_NOISY = tuple(name for name, method in RELAXED.items() if not ESTIMATORS[method.estimator].dense)
_REPLAYED = tuple(name for name, method in RELAXED.items() if method.engine == "replay")
OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("hops", "hop_tolerance"), _REPLAYED),
    **dict.fromkeys(("gumbel_topk", "support", "tau_start", "tau_end", "tau_anneal_steps"), _NOISY),
    "gradient_checkpointing": (*_REPLAYED, *POLICY_GRADIENTS, DISTILLED, OFFLINE, TEACHER),
    "rao_draws": ("gumbel_rao",),
    **dict.fromkeys(
        ("num_generations", "teacher_beta", "teacher_context", "teacher_topk"), (*POLICY_GRADIENTS, DISTILLED, TEACHER)
    ),
    "teacher_weight": (*POLICY_GRADIENTS, DISTILLED),
    "lmbda": (TEACHER,),
    "kl_estimator": POLICY_GRADIENTS,
    **dict.fromkeys(("residual_weight", "distil_window", "substitutions"), (DISTILLED,)),
    **dict.fromkeys(("distil_families", "own_completions"), (DISTILLED, OFFLINE)),
    **dict.fromkeys(("epsilon", "passes_per_step", "minibatches"), _CLIPPED),
    "baseline_momentum": ("reinforce",),
    **dict.fromkeys(("scale_rewards", "self_certainty_reward"), ("grpo",)),
    **dict.fromkeys(
        ("gamma", "gae_lambda", "value_learning_rate", "value_clip", "whiten_advantages", "value_fit"), ("ppo",)
    ),
}
"""Settings that only some methods read, with those methods. Any other setting applies to every method."""
SWITCHES: dict[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("value_learning_rate", "value_clip"), ("value_fit", ("closed_form",))),
    "importance_sampling_cap": ("importance_sampling", ("none",)),
    # `grade.models.samplers.LOCAL`, whose import takes seconds
    **dict.fromkeys(("sampler_folder", "sampler_max_difference"), ("sampler", ("own", "shared"))),
}
"""Settings that are not read where another one has one of these values; of `GradeConfig`, too."""


def reads(method: str, option: str) -> bool:
    """Whether a method reads a setting; ``auto`` reads what any method does that it may stand for."""
    candidates = (DISTILLED, "grpo", TEACHER) if method == AUTO else (method,)
    return any(name in OPTIONS.get(option, candidates) for name in candidates)


def check_teacher(method: str, teacher: str | None, changed: Mapping[str, Any]) -> None:
    """Refuse a teacher that a method does not read, and the method `teacher` or ``changed`` settings without one."""
    if teacher is not None and not reads(method, "teacher_beta"):
        raise InputError("teacher", teacher, f"none with {method}; with {', '.join(OPTIONS['teacher_beta'])}")
    for name, value in changed.items() if teacher is None else ():
        raise InputError(name, value, "another value than the default only with a teacher")
    if teacher is None and method == TEACHER:
        raise InputError("teacher", None, f"a model to learn from, with method {TEACHER}")


def _residual_weight(value: Any) -> float | str:
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1):
        raise ValueError("0 to 1, or auto")  # a union's own error would not name the field
    return value


class _Weight(float):
    """A number or ``auto``: `HfArgumentParser` reads the default by its type, of a union only one."""

    def __new__(cls, text: str) -> Any:
        return text if text == "auto" else float(text)


Rate = Annotated[float, Field(gt=0, le=1000)]
"""A learning rate: AdamW moves a weight by about this much."""
MOST_ROWS, MOST_MICROBATCHES, MOST_PASSES = 2**16, 2**16, 1024
"""Of a microbatch and of a step; more would take longer than anyone waits."""
BYTES_PER_TOKEN = 1024
"""Of a completion in a step, at the least: an embedding of 256 numbers, for the smallest of models."""
Tau = Annotated[float, Field(ge=TAU_RANGE[0], le=TAU_RANGE[1])]


def _scaling(value: object) -> object:
    """TRL's older spelling of ``scale_rewards`` is a truth value."""
    return ("none", "group")[value] if isinstance(value, bool) else value


@dataclass
class MethodConfig(Settings):
    """Settings of a method. `grade.training.config.GradeConfig` adds those of a training run."""

    method: MethodName = setting(
        AUTO,
        f"auto: chosen from the reward; distilled: gradients of a reward distilled from all completions so far; "
        "offline: along scored texts, without samples of the policy; teacher: no reward, a teacher's distributions; "
        f"{', '.join(ESTIMATORS)}: reward gradients by the replay engine; *_legacy: by the original's; "
        f"{', '.join(POLICY_GRADIENTS)}: policy gradients, which take any reward, as distilled does. A setting that a "
        "method does not have is an error",
    )
    max_completion_length: PositiveInt = setting(512, "completion length T in tokens")
    min_completion_length: NonNegativeInt = setting(0, "end-of-sequence is not sampled before this many tokens")
    gradient_checkpointing: bool | None = setting(
        False, "recompute layers in backward (replay engine, policy gradients)"
    )

    gumbel_topk: NonNegativeInt = setting(64, "size K of a token's support; 0 = the full vocabulary")
    support: Support = setting("perturbed_top_k", "top_k, or perturbed_top_k: exact samples for any K")
    rao_draws: PositiveInt = setting(8, "gumbel_rao: draws M of the noise given the token")
    tau_start: Tau = setting(2.0, "Gumbel temperature at the first step")
    tau_end: Tau | None = setting(None, "Gumbel temperature after annealing; null: tau_start")
    tau_anneal_steps: NonNegativeInt = setting(0, "steps of the linear ramp from tau_start to tau_end")
    hops: NonNegativeInt = setting(1, "feedback hops of the replay engine; max_completion_length - 1 is exact")
    hop_tolerance: NonNegativeFloat = setting(0.0, "stop hopping at this relative residual; 0 = take all hops")

    num_generations: PositiveInt | None = setting(
        None, "policy gradients: completions of each prompt, G; null: 8 with a group baseline (rloo, grpo), else 1"
    )
    kl_estimator: Literal["exact", "k3"] = setting(
        "exact",
        "policy gradients: KL over the full vocabulary, or estimated from the sampled token (k3: where "
        "lengths differ its mean is another penalty than KL's; 0.024 of the gradient where that was enumerated)",
    )
    baseline_momentum: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.9, "reinforce: momentum of the baseline over steps"
    )
    epsilon: Annotated[float, Field(gt=0, lt=1)] = setting(0.2, "grpo, ppo: clip range of the probability ratio")
    passes_per_step: Annotated[int, Field(ge=1, le=MOST_PASSES)] | None = setting(
        None, "grpo, ppo: passes over a step's completions; null: 4 for ppo, 1 for grpo (no clipping then)"
    )
    minibatches: PositiveInt = setting(1, "grpo, ppo: updates per pass; each uses an equal share of every microbatch")
    scale_rewards: Annotated[Literal["group", "none"], BeforeValidator(_scaling)] = setting(
        "none", "grpo: group divides advantages by the group's standard deviation, as published; biased"
    )
    self_certainty_reward: bool = setting(False, "grpo: the completion's self-certainty is the reward (Intuitor)")
    gamma: Annotated[float, Field(gt=0, le=1)] = setting(
        1.0, "ppo: discount; 1 gives the same objective as the other methods"
    )
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = setting(0.95, "ppo: lambda of generalised advantage estimation")
    value_learning_rate: Rate = setting(1e-3, "ppo: AdamW learning rate of the value head")
    value_clip: PositiveFloat = setting(0.2, "ppo: clip range of the value, in units of reward")
    whiten_advantages: bool = setting(True, "ppo: whiten the advantages of a step")
    value_fit: Literal["sgd", "closed_form"] = setting(
        "sgd", "ppo: how values are learned: sgd, or closed_form, ridge regression on the frozen base's hidden states"
    )

    residual_weight: Annotated[_Weight, PlainValidator(_residual_weight)] = setting(
        "auto", "distilled: weight of what the distilled reward misses: 0 biased, 1 unbiased, auto from the gradients"
    )
    distil_families: Annotated[list[str], Field(min_length=1)] | None = setting(
        None,
        "distilled: what the reward may be linear in, the best of which is taken: counts, bag, ngrams, values, "
        f"trunk, trunk<layers>, {HINTED} by a teacher; null: {', '.join(FAMILIES)}",
    )
    own_completions: Annotated[int, Field(ge=16, le=2**16)] = setting(
        64,
        "offline, distilled with texts: completions of the policy that measure KL and reward: an eighth at each "
        "quarter of the steps along texts, the rest after the last of them",
    )
    substitutions: Annotated[int, Field(ge=0, le=64)] = setting(
        0,
        "distilled: other tokens that are tried at each place of a completion, each one reward call, so that the fit "
        "sees what one token changes; for rewards that are cheap to call",
    )
    teacher_beta: Annotated[float, Field(ge=0, le=1)] = setting(
        1.0, "divergence from the teacher, as TRL's beta: 0 forward KL, 1 reverse KL, between them generalised "
        "Jensen-Shannon",
    )  # fmt: skip
    teacher_weight: NonNegativeFloat = setting(1.0, "weight of the divergence beside rewards, per nat and token")
    teacher_context: Text = setting("", "text that the teacher alone reads before the prompt; {column} is the row's")
    teacher_topk: PositiveInt = setting(
        20, "likeliest tokens at each position that a teacher behind a server tells of; its --max-logprobs at most"
    )
    lmbda: Annotated[float, Field(ge=0, le=1)] = setting(
        1.0, "teacher: share of steps along own completions, as in TRL; the others are along texts"
    )
    distil_window: PositiveInt = setting(2048, "distilled: completions that are kept for the fit; the oldest go first")

    def __post_init__(self) -> None:
        self.scale_rewards = _scaling(self.scale_rewards)
        self.check_values(field.name for field in fields(MethodConfig))
        if self.min_completion_length > self.max_completion_length:
            allowed = f"at most max_completion_length = {self.max_completion_length}"
            raise InputError("min_completion_length", self.min_completion_length, allowed)
        for option, methods in OPTIONS.items():
            value = getattr(self, option)
            if not reads(self.method, option) and value != self.default_of(option):
                raise InputError(option, value, f"only with {', '.join(methods)}, not with {self.method}")
        for option, (switch, off) in SWITCHES.items():
            at = getattr(self, switch, None)
            if at in off and getattr(self, option) != self.default_of(option):
                allowed = f"{self.default_of(option)} with {switch} = {at}, which does not read it"
                raise InputError(option, getattr(self, option), allowed)
        if (self.tau_end in (None, self.tau_start)) != (self.tau_anneal_steps == 0):
            allowed = "at least 1 where tau_end is not tau_start, otherwise 0"
            raise InputError("tau_anneal_steps", self.tau_anneal_steps, allowed)
        if self.value_fit == "closed_form" and self.kl_estimator != "exact":
            allowed = "exact with value_fit = closed_form, which reads the reference's hidden states"
            raise InputError("kl_estimator", self.kl_estimator, allowed)
        if self.hinted:
            for option in ("teacher_beta", "teacher_weight"):
                if getattr(self, option) != self.default_of(option):
                    allowed = f"{self.default_of(option)} with family {HINTED}: the teacher is no reward then"
                    raise InputError(option, getattr(self, option), allowed)
        if self.method in (*GROUPED, AUTO) and self.group == 1:
            raise InputError("num_generations", 1, f"at least 2 for {self.method}: the baseline comes from the group")
        if self.method in (DISTILLED, AUTO) and self.distil_window < 2 * self.group:
            allowed = f"at least {2 * self.group}: two groups of {self.group}, as each is judged by the others"
            raise InputError("distil_window", self.distil_window, allowed)

    @property
    def hinted(self) -> bool:
        """Whether a teacher predicts rewards instead of being one."""
        return HINTED in (self.distil_families or ())

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Refuse a step that no machine can hold: ``sizes`` are of the batch and the completion, by their names."""
        drawn = {"rao_draws": self.rao_draws} if self.method.startswith("gumbel_rao") else {}
        check_bytes({**sizes, **drawn}, 4 * max(self.gumbel_topk, 1) if drawn else BYTES_PER_TOKEN)

    @staticmethod
    def values_for(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that apply to a method, with ``method`` set: one file can serve several methods."""
        return {name: value for name, value in values.items() if reads(method, name)} | {"method": method}

    @property
    def relaxed(self) -> bool:
        """Whether the method differentiates through relaxed tokens; otherwise it is a policy gradient."""
        return self.method in RELAXED

    @property
    def policy_gradient(self) -> PolicyGradientMethod | None:
        """The method's row, if it is a policy gradient."""
        return POLICY_GRADIENT_METHODS.get(self.method)

    @property
    def group(self) -> int:
        """G, completions of each prompt in a microbatch."""
        return self.num_generations or (8 if self.method in (*GROUPED, AUTO) else 1)

    @property
    def passes(self) -> int:
        """Passes of the update over a step's completions."""
        return self.passes_per_step or (self.policy_gradient.passes if self.policy_gradient else 1)

    @property
    def updates(self) -> int:
        """Optimizer updates in a step."""
        return self.passes * self.minibatches

    def relaxation(self, step: int = 0) -> RelaxationConfig:
        """The relaxation at an optimizer step, which sets the Gumbel temperature."""
        tau = tau_at(step, self.tau_start, self.tau_end or self.tau_start, self.tau_anneal_steps)
        return RelaxationConfig(
            estimator=RELAXED[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=tau,
            rao_draws=self.rao_draws, max_new_tokens=self.max_completion_length,
            min_new_tokens=self.min_completion_length,
        )  # fmt: skip
