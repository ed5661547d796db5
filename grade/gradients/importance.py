"""Truncated importance weights: policy gradients of completions that a slightly different policy has sampled.

The sampler's policy q has other kernels or another type than the trained one, p. With ``r_t = p(y_t | y_<t) /
q(y_t | y_<t)`` the gradient of the objective is an average over q's completions with weights (Ionides 2008, Truncated
Importance Sampling; Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"):

- sequence: ``w = min(prod_t r_t, C)`` for all of a completion's terms, KL included. Not truncated, ``E_q[w f] =
  E_p[f]``: unbiased. Its variance grows with the length.
- token: ``w_t = min(r_t, C)`` for the term of token t. Little variance, but the prefixes are still q's: biased, even
  if nothing is truncated. KL's own gradient at t depends on the prefix alone, so it has no weight.

Truncation bounds the variance, and the bias by ``E_p[|f|; w > C]``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ImportanceSampling = Literal["none", "token", "sequence"]


@torch.no_grad()
def importance_weights(
    logps: Tensor, sampler_logps: Tensor, mask: Tensor, level: ImportanceSampling, cap: float
) -> Tensor | None:
    """Weights of sampled tokens, constants of the update.

    Args:
        logps: The policy's log-probabilities [B, T].
        sampler_logps: The sampler's [B, T].
        mask: [B, T].
        level: token or sequence; none: no weights.
        cap: C, the largest weight.

    Returns:
        Weights [B, T], or [B, 1] of sequences; None without.

    >>> q, p = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> importance_weights(p, q, torch.ones(1, 2), "token", 1.2)        # 1/2, and 3/2 truncated
    tensor([[0.5000, 1.2000]])
    >>> importance_weights(p, q, torch.ones(1, 2), "sequence", 1.2)     # 1/2 * 3/2
    tensor([[0.7500]])
    """
    if level == "none":
        return None
    difference = (logps - sampler_logps) * mask
    if level == "sequence":
        difference = difference.sum(1, keepdim=True)
    return difference.exp().clamp(max=cap)
