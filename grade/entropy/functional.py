"""A policy's scores at other parameters, leaving the policy unchanged: `torch.func.functional_call`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call

from grade.entropy.samples import Samples
from grade.models.parameters import split_vector, trained_parameters
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden, score_hidden

if TYPE_CHECKING:
    from grade.models.backbone import Backbone


class HiddenStates(nn.Module):
    """`predicting_hidden` as a module whose parameters can be replaced for one call.

    Args:
        backbone: The policy.
    """

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.model = backbone.model
        # In a tuple, so that it is no submodule. A backbone has its decoder under two names, and `functional_call`
        # restores parameters name by name: it would leave the replaced ones in a module registered twice.
        self.hidden_backbone = (backbone,)

    def forward(self, prompts: PromptBatch, ids: Tensor) -> Tensor:
        """Hidden states [B, T, D] at the positions that predict the tokens of completions [B, T]."""
        return predicting_hidden(self.hidden_backbone[0], prompts, ids)

    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by the names that `functional_call` takes, in the order of `trained_parameters`."""
        trained = {id(p) for p in trained_parameters(self.hidden_backbone[0])}
        return {name: p for name, p in self.named_parameters() if id(p) in trained}


@dataclass(frozen=True)
class SampleScores:
    """Scores of samples under one set of parameters, float64 on the CPU.

    Attributes:
        logps: ``log pi(y_t)`` in nats [B, G, T], 0 where masked.
        entropies: Entropy of each token's distribution in nats [B, G, T], 0 where masked.
    """

    logps: Tensor
    entropies: Tensor


@torch.no_grad()
def scores_at(
    backbone: Backbone, samples: Samples, vector: Tensor | None = None, eta: float = 1.0, microbatch: int = 8
) -> SampleScores:
    """Log-probabilities and entropies at ``theta + eta v``.

    Args:
        backbone: The policy, unchanged.
        samples: Completions.
        vector: v [P]; None: at theta.
        eta: Step size.
        microbatch: Completions per forward pass.

    Returns:
        The scores.

    Raises:
        ValueError: If the vector does not fit.
    """
    module, replaced = HiddenStates(backbone), {}
    if vector is not None:
        parts = zip(module.trained().items(), split_vector(backbone, vector), strict=True)
        replaced = {name: p + eta * part for (name, p), part in parts}
    logps, entropies = (torch.zeros(samples.ids.shape, dtype=torch.float64) for _ in range(2))
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device):
        hidden = functional_call(module, replaced, (prompts, ids))
        scores = score_hidden(backbone, hidden, ids, mask, ("logps", "entropy"), samples.temperature)
        logps.view(-1, ids.shape[1])[rows] = scores.logps.double().cpu()
        entropies.view(-1, ids.shape[1])[rows] = scores.entropy.double().cpu()
    return SampleScores(logps, entropies)
