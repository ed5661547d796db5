"""A step of `distilled` without a fit: what it keeps and allocates on the device, whatever the rewards are.

Included: sampling, scoring, features, the rows of all families of a full window and of as many completions as may wait,
their copy when these are entered and the products with them, the weights of a fit without each of the step's groups,
and the gradient with the two parts apart, as in the steps that measure them. The family that is used is the last. Left
out: what is on the CPU for any device, that is Gram matrices and factors (8 bytes times the square of the window for
each family) and lists of tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from grade.gradients.distilled.families import Observed
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.ridge import Choice
from grade.gradients.distilled.store import Fit, growth, joined
from grade.gradients.methods import MethodConfig
from grade.gradients.policy_gradient import StepContext
from grade.memory.nodata import has_data
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.scoring import completion_states

SHARES = torch.tensor([1.0, 0.5], dtype=torch.float64)
"""A square and the shares of two equal parts, where there is no data."""


class TracedDistilled(DistilledGradient):
    """The method with a full window, and fits whose values are not looked at.

    Args:
        config: Settings.
        backbone: Policy and reference.
        prompts: A microbatch's prompts, of which the features have their shapes.
    """

    def __init__(self, config: MethodConfig, backbone: Backbone, prompts: PromptBatch) -> None:
        super().__init__(config, backbone)
        self.kept = nn.Module()
        few, shape = prompts[:1], (1, config.max_completion_length)
        ids = torch.zeros(shape, dtype=torch.long, device=backbone.device)
        mask = torch.ones_like(ids)
        depths = [family.depth for family in self.families.values() if family.depth is not None]
        seen = Observed(few, ids, mask, completion_states(backbone, few, ids, mask, depths))
        for name, family in self.families.items():
            row = family.rows(seen)
            self.kept.register_buffer(f"rows_{name}", row.new_zeros(self.store.window, *row.shape[1:]))
            waiting = math.ceil(growth(self.store.window) / 2)
            self.kept.register_buffer(f"waiting_{name}", row.new_zeros(waiting, *row.shape[1:]))
            for number, signs in enumerate(getattr(family, "_signs", ())):
                self.kept.register_buffer(f"signs_{name}_{number}", signs)

    @torch.no_grad()
    def update_fit(self, samples: list[Sample], context: StepContext) -> None:
        """Enter rows and make the weights of a fit; see the module."""
        self.steps, groups = 0, sum(len(s.reward) for s in samples) // self.config.group
        for name, family in self.families.items():
            new = joined([getattr(self.kept, f"waiting_{name}"), *(s.rows[name] for s in samples)])
            rows = joined([getattr(self.kept, f"rows_{name}"), new])
            if new.dtype != torch.long:  # buckets are multiplied on the CPU
                family.gram(new, rows)
            setattr(self.kept, f"rows_{name}", rows[len(new) :])  # a view, as in the store
            setattr(self.kept, f"waiting_{name}", new[: -sum(len(s.reward) for s in samples)])
        *_, name = self.families
        rows = getattr(self.kept, f"rows_{name}")
        alpha = torch.zeros(1 + groups, len(rows), dtype=torch.float64, device=rows.device)
        self.fit = Fit(name, self.families[name].weights(alpha, rows), Choice(1.0, 0.5, 1.0, 0.1))


def total(values: Tensor) -> Tensor:
    """The sum over one process; what the blend reads of it has a value where there is no data."""
    return values if has_data(values) or values.shape != SHARES.shape else SHARES
