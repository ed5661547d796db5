"""The entropy's change along a direction in forward mode: without a graph or a gradient.

With ``H_t`` the entropy of the distribution of token t given what precedes it (a Rao-Blackwellised integrand: exact
over the vocabulary, sampled only over prefixes), ``H = E sum_t H_t`` and

    dH[v] = E sum_t ( dH_t[v] + (G_t - b_t) d log pi(y_t)[v] ),   G_t = sum_{k > t} H_k

d.[v] is a directional derivative: a Jacobian-vector product of one forward pass. The baseline b_t does not depend
on y_t. Per token, ``H_tok = E sum_t H_t / E L`` with L a completion's length, and by the quotient rule

    dH_tok[v] = ( dH[v] - H_tok dE[L][v] ) / E L,   dE[L][v] = E sum_t (L - t - c_t) d log pi(y_t)[v]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from grade.entropy.functional import HiddenStates
from grade.entropy.samples import Samples
from grade.errors import InputError
from grade.models.parameters import split_vector

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

ROWS = 64
"""Rows of logits, with their tangents, computed at once."""


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
        later = _later(self.entropies)
        baseline = _others(later) if baseline is None else baseline
        return (self.d_entropies + (later - baseline) * self.d_logps).sum(-1)

    def per_token(self, mask: Tensor) -> Tensor:
        """Each sample's part [B, G] of ``dH_tok[v]``, which is their mean.

        Args:
            mask: Of the samples [B, G, T].
        """
        mask = mask.double()
        later, length = _later(mask), mask.sum() / mask[..., 0].numel()
        d_length = ((later - _others(later)) * self.d_logps).sum(-1)
        return (self.per_sequence() - self.entropies.sum() / mask.sum() * d_length) / length


def _later(values: Tensor) -> Tensor:
    """Sum over the tokens after each [.., T]."""
    return values.flip(-1).cumsum(-1).flip(-1) - values


def _others(values: Tensor) -> Tensor:
    """Mean over the prompt's other completions, 0 if there are none: a baseline independent of the token."""
    return (values.sum(1, keepdim=True) - values) / max(values.shape[1] - 1, 1)


@torch.no_grad()
def directional(backbone: Backbone, samples: Samples, vector: Tensor, microbatch: int = 8) -> Directional:
    """Forward-mode derivatives along a vector.

    Fused attention has no forward mode, so torch's unfused implementation is used here, whatever the model's own.

    Args:
        backbone: The policy, unchanged.
        samples: Completions.
        vector: v [P], in the order of `trained_parameters`.
        microbatch: Completions per forward pass.

    Returns:
        The terms.

    Raises:
        ValueError: If the vector does not fit.
        InputError: If the attention has no forward mode.
    """
    implementation = backbone.model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise InputError("attention", implementation, "sdpa or eager: no other has a forward mode")
    module, terms = HiddenStates(backbone), [torch.zeros(samples.ids.shape, dtype=torch.float64) for _ in range(3)]
    tangents = zip(module.trained().items(), split_vector(backbone, vector), strict=True)
    pairs = {name: (p.detach(), tangent) for (name, p), tangent in tangents}
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device):
        with fwd.dual_level(), sdpa_kernel(SDPBackend.MATH):
            dual = {name: fwd.make_dual(*pair) for name, pair in pairs.items()}
            hidden = functional_call(module, dual, (prompts, ids)).flatten(0, 1)
            chunks = [_row_terms(backbone, h, i, samples.temperature)
                      for h, i in zip(hidden.split(ROWS), ids.flatten().split(ROWS), strict=True)]  # fmt: skip
        for total, values in zip(terms, zip(*chunks, strict=True), strict=True):
            total.view(-1, total.shape[-1])[rows] = (torch.cat(values).view(mask.shape) * mask).double().cpu()
    return Directional(*terms)


def _row_terms(backbone: Backbone, hidden: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    logp = (backbone.head(hidden) / temperature).log_softmax(-1)
    entropy = fwd.unpack_dual(-(logp.exp() * logp).sum(-1))
    chosen = fwd.unpack_dual(logp.gather(1, ids.unsqueeze(1)).squeeze(1))
    zero = torch.zeros_like(entropy.primal)
    return entropy.primal, zero if entropy.tangent is None else entropy.tangent, chosen.tangent
