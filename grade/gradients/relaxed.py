"""Relaxed methods as learners: a step made of an engine's gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from grade.gradients.learner import Learner, Microbatch, StepContext
from grade.gradients.objective import GradientStep, Objective


class RelaxedGradient(Learner):
    """Differentiates the reward through relaxed tokens, one microbatch after the other."""

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """Add the gradient of each microbatch of prompts, which the engine samples itself; one result for each."""
        engine, steps = self.config.engine(), []
        relaxation = self.config.relaxation()
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
