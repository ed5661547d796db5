"""Relaxed methods as learners: their settings, and a step made of an engine's gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Self

import pydantic
from pydantic import AfterValidator, Field, NonNegativeInt

from grade.config import Config
from grade.errors import InputError
from grade.gradients.engines import make_engine
from grade.gradients.estimators import RelaxationConfig, Support, tau_at
from grade.gradients.learner import Learner, Microbatch, StepContext
from grade.gradients.methods import RELAXED, Tau
from grade.gradients.objective import Engine, GradientStep, Objective


def _several(size: int) -> int:
    if size == 1:
        raise InputError("gumbel_topk", 1, "0 (the full vocabulary) or at least 2: a token alone has no gradient")
    return size


SupportSize = Annotated[int, Field(ge=0), AfterValidator(_several)]


class RelaxedSettings(Config):
    """Settings of methods that relax tokens; see `grade.gradients.estimators`."""

    gumbel_topk: SupportSize = Field(256, description="size K of a token's support; 0 = the full vocabulary")
    support: Support = Field("perturbed_top_k", description="top_k, or perturbed_top_k: exact samples for any K")
    tau_start: Tau = Field(2.0, description="Gumbel temperature at the first step")
    tau_end: Tau | None = Field(None, description="Gumbel temperature after annealing; null: tau_start")
    tau_anneal_steps: NonNegativeInt = Field(0, description="steps of the linear ramp from tau_start to tau_end")

    @pydantic.model_validator(mode="after")
    def _check_ramp(self) -> Self:
        if (self.tau_end in (None, self.tau_start)) != (self.tau_anneal_steps == 0):
            allowed = "at least 1 where tau_end is not tau_start, otherwise 0"
            raise InputError("tau_anneal_steps", self.tau_anneal_steps, allowed)
        return self

    def relaxation(self, step: int = 0) -> RelaxationConfig:
        """The relaxation at an optimizer step, which sets the Gumbel temperature."""
        tau = tau_at(step, self.tau_start, self.tau_end or self.tau_start, self.tau_anneal_steps)
        return RelaxationConfig(
            estimator=RELAXED[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=tau,
            max_new_tokens=self.max_completion_length, min_new_tokens=self.min_completion_length,
        )  # fmt: skip

    def engine(self) -> Engine:
        """The engine of the method, which keeps the whole graph."""
        return make_engine(RELAXED[self.method].engine)


class ReplayedSettings(RelaxedSettings):
    """Those of methods that the replay engine differentiates."""

    hops: NonNegativeInt = Field(2, description="feedback hops of the engine; max_completion_length - 1 is exact")

    def engine(self) -> Engine:
        """The replay engine with these settings."""
        return make_engine("replay", hops=self.hops, gradient_checkpointing=self.gradient_checkpointing)


class RelaxedGradient(Learner):
    """Differentiates the reward through relaxed tokens, one microbatch after the other."""

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """Add the gradient of each microbatch of prompts, which the engine samples itself; one result for each."""
        engine, steps = self.config.engine(), []
        relaxation = self.config.relaxation(context.step)
        self.figures = {}
        for prompts, generator in microbatches:
            step = engine(self.backbone, prompts, objective, relaxation, generator, 1 / context.microbatches)
            figures = {"tau": relaxation.tau}
            if step.residual is not None:
                figures["residual"] = step.residual.double()
            self._note(figures)
            steps.append(replace(step, scores=objective.reward_model.last))
        context.apply()
        return steps
