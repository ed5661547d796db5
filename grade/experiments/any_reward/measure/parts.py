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


def fitted_ascent(
    learner: DistilledGradient, sample: Sample, fit: Fit | None, hidden: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ascent` with a reward distilled from other completions; without one the residual is `rloo`'s."""
    groups = len(sample.reward) // learner.config.group
    # The learner takes the fit without a prompt's own completions; of a fit on others, that is the fit itself.
    learner.fit = fit and replace(fit, weights=fit.weights[:1].expand(1 + groups, -1))
    return ascent(learner, sample, hidden)


def ascent(learner: DistilledGradient, sample: Sample, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Ascent directions of plug-in and residual with the learner's own fit, by the hidden states [B, T, D] (a leaf).

    Their sum is unbiased if the family is additive, and `rloo`'s otherwise.
    """
    rows = slice(0, len(sample.reward))
    (*losses, _), _ = learner.losses_from(hidden, sample, rows, 0, Objective(None, 0.0))  # type: ignore[arg-type]
    plug, residual = (
        -torch.autograd.grad(loss, hidden, retain_graph=True)[0] if loss.requires_grad else torch.zeros_like(hidden)
        for loss in losses
    )
    return plug, residual
