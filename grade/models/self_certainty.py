"""Self-certainty, Intuitor's reward: how far the next-token distribution is from uniform.

At one position with logits ``l`` [V] and sampling temperature t, ``p = softmax(l / t)``:

    SC = KL(U || p) = logsumexp(l / t) - mean(l / t) - log V   (nats, 0 for a uniform p)

and a completion's score is the mean over its tokens, each taken at the position that *predicts* the token (Zhao et al.
2025, arXiv:2505.19590, section 3.2; the metric is Kang et al. 2025, arXiv:2502.18581). The published code leaves
``log V`` out: a constant, which cancels where a group mean is subtracted.

Computed exactly from hidden states, in chunks of rows. A row needs all V logits: chunking the vocabulary and averaging
the chunks' values, as document 004 proposes, gives a different quantity.
"""

from __future__ import annotations

import math

from torch import Tensor

from grade.errors import InputError
from grade.models.head import Head, row_values


def self_certainty(head: Head, hidden: Tensor, temperature: float = 1.0) -> Tensor:
    """``KL(U || softmax(head(h) / t))`` row by row, from hidden states; see `grade.models.head.row_values`.

    Differentiable in ``hidden``: ``dSC/dl_v = (p_v - 1 / V) / t``.

    Args:
        head: The frozen head.
        hidden: Hidden states [N, D].
        temperature: Sampling temperature t of the policy that is scored.

    Returns:
        [N] in nats, at least 0, float32 (float64 for a float64 model).

    Raises:
        InputError: If the temperature is not positive.
    """
    if not 0 < temperature < math.inf:
        raise InputError("temperature", temperature, "a finite number above 0")

    def of_logits(logits: Tensor, needed: bool, _: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        scaled = logits.div_(temperature)
        values = certainty_of_logits(scaled)
        return values, scaled.softmax(-1).sub_(1 / scaled.shape[-1]).div_(temperature) if needed else None

    return row_values(head, hidden, of_logits)


def certainty_of_logits(logits: Tensor) -> Tensor:
    """``logsumexp(l) - mean(l) - log V`` of given logits [..., V].

    >>> import torch
    >>> certainty_of_logits(torch.zeros(4)).abs() < 1e-6                 # uniform
    tensor(True)
    >>> round(float(certainty_of_logits(torch.tensor([math.log(2.0), 0.0]))), 4)   # p = 2/3, 1/3
    0.0589
    """
    return logits.logsumexp(-1) - logits.mean(-1) - math.log(logits.shape[-1])


def completion_certainty(values: Tensor, mask: Tensor) -> Tensor:
    """Score of each completion: the mean over its tokens.

    Args:
        values: `self_certainty` at the positions that predict the tokens [B, T].
        mask: [B, T], 1 at a token, end-of-sequence included.

    Returns:
        [B].

    Raises:
        ValueError: If a completion has no token.
    """
    if not mask.bool().any(-1).all():
        raise ValueError(f"completions of {mask.sum(-1).tolist()} tokens: each needs at least one token")
    return (values * mask).sum(-1) / mask.sum(-1)
