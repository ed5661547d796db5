"""Settings of the methods, beside those that all have (`grade.gradients.methods`).

Nothing here imports torch, so that ``grade train --help`` and an error about a setting take no seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from grade.config import Config, allowed_names
from grade.errors import InputError
from grade.gradients.methods import METHODS, RELAXED, TILT, Tau
from grade.plugins import Support

if TYPE_CHECKING:
    from grade.gradients.estimators import RelaxationConfig
    from grade.gradients.objective import Engine


def _several(size: int) -> int:
    if size == 1:
        raise InputError("gumbel_topk", 1, "0 (the full vocabulary) or at least 2: a token alone has no gradient")
    return size


SupportSize = Annotated[int, Field(ge=0), AfterValidator(_several)]


class RelaxedSettings(Config):
    """Settings of methods that relax tokens; see `grade.gradients.estimators`."""

    gumbel_topk: SupportSize = Field(256, description="size K of a token's support; 0 = the full vocabulary")
    support: Support = Field("perturbed_top_k", description="top_k, or perturbed_top_k: exact samples for any K")
    tau: Tau = Field(2.0, description="Gumbel temperature")

    def relaxation(self) -> RelaxationConfig:
        """How tokens are relaxed."""
        from grade.gradients.estimators import RelaxationConfig

        return RelaxationConfig(
            estimator=RELAXED[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=self.tau,
            max_new_tokens=self.max_completion_length, min_new_tokens=self.min_completion_length,
        )  # fmt: skip

    def engine(self) -> Engine:
        """The engine of the method, which keeps the whole graph."""
        from grade.gradients.engines import make_engine

        return make_engine(RELAXED[self.method].engine)


class ReplayedSettings(RelaxedSettings):
    """Those of methods that the replay engine differentiates."""

    hops: NonNegativeInt = Field(2, description="feedback hops of the engine; max_completion_length - 1 is exact")

    def engine(self) -> Engine:
        """The replay engine with these settings."""
        from grade.gradients.engines import make_engine

        return make_engine("replay", hops=self.hops, gradient_checkpointing=self.gradient_checkpointing)


class SampledSettings(Config):
    """Settings of methods that sample G completions of each prompt."""

    num_generations: PositiveInt = Field(1, description="completions of each prompt, G")

    @property
    def group(self) -> int:
        """G, completions of each prompt."""
        return self.num_generations


class GroupSettings(SampledSettings):
    """Settings of methods whose baseline is the mean of the prompt's other completions."""

    num_generations: Annotated[int, Field(ge=2)] = Field(8, description="completions of each prompt, G")


class _ClippedSettings(Config):
    """Settings of methods that may update several times per step."""

    epsilon: Annotated[float, Field(gt=0, lt=1)] = Field(0.2, description="clip range of the probability ratio")
    passes_per_step: Annotated[int, Field(ge=1)] = Field(1, description="passes over a step's completions")

    @property
    def updates(self) -> int:
        """Optimizer updates in a step."""
        return self.passes_per_step


class GRPOSettings(_ClippedSettings, GroupSettings):
    """Settings of `grpo`, and of the methods that ``auto`` may stand for."""

    scale_rewards: Literal["group", "none"] = Field(
        "none", description="group divides advantages by the group's standard deviation, as published; biased"
    )


class PPOSettings(_ClippedSettings, SampledSettings):
    """Settings of `ppo`."""

    passes_per_step: Annotated[int, Field(ge=1)] = Field(4, description="passes over a step's completions")


def _follower(name: str) -> str:
    known = ["", *(other for other, method in METHODS.items() if other != TILT and method.rewarded)]
    if name not in known:
        raise InputError("then", name, allowed_names(name, known[1:]))
    return name


class TiltSettings(GroupSettings):
    """Settings of `tilt`."""

    then: Annotated[str, AfterValidator(_follower)] = Field(
        "",
        description="method that trains the adapter beside the bias in the second half of the steps; auto: rloo, and "
        "from a quarter or half of them on the bias, if it predicts new rewards",
    )
