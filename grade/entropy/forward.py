"""The entropy's change along a direction in forward mode: no graph is kept, and no gradient is formed.

With ``H_t`` the entropy of the distribution of token t given what precedes it (a Rao-Blackwellised integrand: exact
over the vocabulary, sampled only over prefixes), ``H = E sum_t H_t`` and

    dH[v] = E sum_t ( dH_t[v] + (G_t - b_t) d log pi(y_t)[v] ),   G_t = sum_{k > t} H_k

d.[v] is a directional derivative, had as a Jacobian-vector product of one forward pass. The baseline b_t does not
depend on y_t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from grade.backbone import Backbone
from grade.entropy.gradients import trained_parameters
from grade.entropy.samples import Samples
from grade.errors import InputError
from grade.prompts import PromptBatch
from grade.scoring import predicting_hidden

ROWS = 64
"""Rows of logits, with their tangents, that exist at once."""


@dataclass(frozen=True)
class Directional:
    """Derivatives along v of each sample's terms, each [B, G, T] in float64 on the CPU, 0 where masked.

    Attributes:
        entropies: H_t.
        d_entropies: ``dH_t[v]``.
        d_logps: ``d log pi(y_t)[v]``.
    """

    entropies: Tensor
    d_entropies: Tensor
    d_logps: Tensor

    def per_sequence(self, baseline: Tensor | None = None) -> Tensor:
        """``sum_t dH_t + (G_t - b_t) dlogp_t`` [B, G], whose expectation is ``dH[v]``.

        Args:
            baseline: b_t [B, G, T]; default: the leave-one-out mean of G_t over the prompt's other completions, or 0
                if there is only one.
        """
        to_go = self.entropies.flip(-1).cumsum(-1).flip(-1) - self.entropies
        if baseline is None:
            group = to_go.shape[1]
            others = (to_go.sum(1, keepdim=True) - to_go) / max(group - 1, 1)
            baseline = others if group > 1 else torch.zeros_like(to_go)
        return (self.d_entropies + (to_go - baseline) * self.d_logps).sum(-1)


class _Hidden(nn.Module):
    """`predicting_hidden` as a module whose parameters can be exchanged."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.model = backbone.model
        # Out of sight: a backbone has its decoder under two names, and `functional_call`, which puts every name's
        # parameter back, would leave the exchanged ones in a module that it sees twice.
        self.out_of_sight = (backbone,)

    def forward(self, prompts: PromptBatch, ids: Tensor) -> Tensor:
        return predicting_hidden(self.out_of_sight[0], prompts, ids)


@torch.no_grad()
def directional(backbone: Backbone, samples: Samples, vector: Tensor, microbatch: int = 8) -> Directional:
    """Forward-mode derivatives along a vector.

    Fused attention has no forward mode: torch's unfused implementation is chosen here, whatever the model has.

    Args:
        backbone: The policy; nothing in it changes.
        samples: Completions.
        vector: v [P], in the order of `trained_parameters`.
        microbatch: Completions at once.

    Returns:
        The terms.

    Raises:
        InputError: If the vector does not fit.
    """
    parameters = trained_parameters(backbone)
    size = sum(p.numel() for p in parameters)
    if vector.shape != (size,):
        raise InputError("update vector", list(vector.shape), f"[{size}], one number for each trained parameter")
    parts = vector.split([p.numel() for p in parameters])
    tangents = {id(p): part.view_as(p).to(p) for p, part in zip(parameters, parts, strict=True)}
    module, found = _Hidden(backbone), [torch.zeros(samples.ids.shape, dtype=torch.float64) for _ in range(3)]
    names = {name: p for name, p in module.named_parameters() if id(p) in tangents}
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device):
        with fwd.dual_level(), sdpa_kernel(SDPBackend.MATH):
            dual = {name: fwd.make_dual(p.detach(), tangents[id(p)]) for name, p in names.items()}
            hidden = functional_call(module, dual, (prompts, ids)).flatten(0, 1)
            terms = [_row_terms(backbone, h, i, samples.temperature)
                     for h, i in zip(hidden.split(ROWS), ids.flatten().split(ROWS), strict=True)]  # fmt: skip
        for total, values in zip(found, zip(*terms, strict=True), strict=True):
            total.view(-1, total.shape[-1])[rows] = (torch.cat(values).view(mask.shape) * mask).double().cpu()
    return Directional(*found)


def _row_terms(backbone: Backbone, hidden: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logp = (backbone.head(hidden) / temperature).log_softmax(-1)
    entropy = fwd.unpack_dual(-(logp.exp() * logp).sum(-1))
    chosen = fwd.unpack_dual(logp.gather(1, ids.unsqueeze(1)).squeeze(1))
    zero = torch.zeros_like(entropy.primal)
    return entropy.primal, zero if entropy.tangent is None else entropy.tangent, chosen.tangent
