"""The learner's own losses of given completions, taken where their hidden states are known.

`grade.gradients.distilled.learner` makes a step of sampling, fitting and losses. To measure gradients, completions,
fits and hidden states come from outside, and the losses end at the hidden states: one graph then serves many fits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.store import Fit
from grade.gradients.objective import Objective


def split_losses(learner: DistilledGradient, sample: Sample, fit: Fit | None, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The learner's losses of plug-in and residual, from hidden states.

    Args:
        learner: Settings and families. Its fit is replaced.
        sample: Completions with rewards, groups in a row.
        fit: A reward distilled from other completions, of which the first weights [1, F] count; None: the residual is
            `rloo`'s loss.
        hidden: States [B, T, D] that predict the completions.

    Returns:
        Two scalars. Minus the gradient of their sum is unbiased if the family is additive, and `rloo`'s otherwise.
    """
    groups = len(sample.reward) // learner.config.group
    # The learner takes the fit without a prompt's own completions; of a fit on others, that is the fit itself.
    learner.fit = fit and replace(fit, weights=fit.weights[:1].expand(1 + groups, -1))
    return step_losses(learner, sample, hidden)


def step_losses(learner: DistilledGradient, sample: Sample, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`split_losses` with the learner's own fit."""
    rows = slice(0, len(sample.reward))
    (plug, residual, _), _ = learner.losses_from(hidden, sample, rows, 0, Objective(None, 0.0))  # type: ignore[arg-type]
    return plug, residual


def state_gradients(losses: tuple[Tensor, Tensor], leaf: Tensor) -> tuple[Tensor, Tensor]:
    """Ascent directions [B, T, D] of both losses with respect to the hidden states."""
    found = []
    for loss in losses:
        needed = loss.requires_grad
        found.append(-torch.autograd.grad(loss, leaf, retain_graph=True)[0] if needed else torch.zeros_like(leaf))
    return found[0], found[1]
