"""The method `distilled` on completions that another engine has sampled.

Not corrected for the sampler's policy: the residual's weight assumes samples of the policy itself, so the trainer
bounds how far the two may be apart (`grade.models.samplers.interface.mismatch`).
"""

from __future__ import annotations

import torch

from grade.gradients.distilled.families import Observed
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.objective import GradientStep, Objective, check_finite
from grade.gradients.policy_gradient import Completions, StepContext
from grade.models.states import completion_states


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
        prompts, ids, mask = completions.prompts, completions.ids, completions.mask
        reward = objective.score(self.backbone, prompts, ids, mask)
        check_finite(reward, reward)
        depths = sorted({family.depth for family in self.families.values() if family.depth is not None})
        seen = Observed(prompts, ids, mask, completion_states(self.backbone, prompts, ids, mask, depths))
        return Sample(seen, reward, {name: family.rows(seen) for name, family in self.families.items()})
