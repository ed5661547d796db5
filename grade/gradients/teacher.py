"""Distillation from a teacher: no reward, the value of every token is known.

With the divergence ``D_t`` of the policy from a teacher (`grade.models.head.jensen_shannon`) a step descends

    g = mean_b mean_t grad D_t

at the positions of given completions: the policy's own (on-policy distillation, GKD; Agarwal et al. 2024,
arXiv:2306.13649), given text, or steps of both kinds. For the reverse KL this is the all-action gradient with the
values ``s_t(v) = log q(v | y_<t) - log pi(v | y_<t)``, up to their mean.

Completions are taken as given: what a token changes for the divergence of later ones is left out, as in TRL. With a
policy gradient or `distilled` the divergence is a reward, and its gradient is exact.
"""

from __future__ import annotations

import torch

from grade.gradients.objective import GradientStep, Objective, sequence_mean
from grade.gradients.policy_gradient import Completions, Learner
from grade.models.scoring import token_kl


class TeacherGradient(Learner):
    """The method. It keeps nothing between steps."""

    inverse = True  # nothing here reads the noise

    def accumulate(self, completions: Completions, objective: Objective, scale: float = 1.0) -> GradientStep:
        """Add the gradient along completions; the reward is minus the divergence."""
        (prompts, ids, mask), teacher, near = completions.text, objective.teacher, objective.beta > 0
        states = teacher.hidden(prompts, ids, mask)
        reference = self.reference(prompts, ids) if near else None
        hidden = self.hidden(prompts, ids)
        divergence = sequence_mean(teacher.divergence(hidden, states, mask), mask)
        loss, kl = teacher.weight * divergence.mean(), torch.full(mask.shape, torch.nan, device=mask.device)
        if near:
            kl = token_kl(self.backbone, hidden, reference, mask)
            loss = loss + objective.beta * sequence_mean(kl, mask).mean()
        (loss * scale).backward(inputs=self.backbone.trainable_parameters())
        return GradientStep(ids, mask, -teacher.weight * divergence.detach(), kl.detach(), loss.detach())
