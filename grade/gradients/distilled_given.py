"""The method `distilled` on completions that another engine has sampled.

Not corrected for the sampler's policy: the residual's weight assumes samples of the policy itself, so the trainer
bounds how far the two may be apart (`grade.models.samplers.Samples.mismatch`).
"""

from __future__ import annotations

import torch

from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.objective import GradientStep, Objective
from grade.gradients.policy_gradient import Completions, StepContext


class DistilledFromGiven(DistilledGradient):
    """`DistilledGradient` whose `step` gets completions instead of prompts and generators."""

    def step(self, microbatches: list[Completions], objective: Objective, context: StepContext) -> list[GradientStep]:
        """Score and distil completions, and add the gradient.

        Args:
            microbatches: This process's completions, G of each prompt in a row.
            objective: Reward and KL weight.
            context: The training loop.

        Returns:
            One result per microbatch.

        Raises:
            InputError: For a reward that is not finite.
        """
        return super().step([(completions, None) for completions in microbatches], objective, context)

    @torch.no_grad()
    def sample(self, completions: Completions, generator: None, objective: Objective) -> Sample:
        """The completions, scored and with features."""
        return self.scored(completions.prompts, completions.ids, completions.mask, objective)
