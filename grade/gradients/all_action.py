"""Expectations over every token of the vocabulary, with their exact gradient.

At one position a policy ``pi = softmax(l)`` [V] and values ``s`` [V] of its tokens give ``E_pi s = sum_v pi_v s_v``.
Its gradient ``dE/dl_v = pi_v (s_v - E)`` weighs every token by its probability, where a policy gradient has the token
that was drawn. This is the all-action, or expected, policy gradient: given the values it has no variance from the
action (Sutton et al. 2000; Allen et al. 2017, mean actor-critic, arXiv:1709.00503; Ciosek and Whiteson 2018, expected
policy gradients, arXiv:1706.05374; Petit et al. 2019, all-action policy gradient methods).

With the reward's slope ``u`` at a position's embedding, ``s_v = <u, e_v>`` is a first-order critic: up to a constant,
the reward after a change of this token alone, to first order (`embedding_values`). The gradient of ``E_pi s`` then is
that of straight-through without noise, the estimator `st`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grade.models.head import Head, row_values, wide

Values = Callable[[Tensor], Tensor]
"""From row numbers [n] to the values of all tokens in these rows, [n, V], or [V] or [1, V] if all rows share them."""


def expected_values(
    head: Head, hidden: Tensor, values: Values, forbidden: tuple[int, ...] = (), where: Tensor | None = None
) -> Tensor:
    """``E_pi s = sum_v pi_v s_v`` with ``pi = softmax(head(h))``, from hidden states; see `row_values`.

    Differentiable in ``hidden``: ``dE/dl_v = pi_v (s_v - E)``, 0 at a forbidden v. Logits and values exist for a chunk
    of rows at a time: no [N, V] tensor is made or kept.

    Hidden states are [N, D], expectations [N] in the values' unit, float32 (float64 for a float64 model). ``values``
    are called with row numbers [n] (int64) and give s without gradient: constants, in any unit, finite for forbidden
    tokens too.
    """

    def of_logits(logits: Tensor, needed: bool, others: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        (numbers,) = others
        p = logits.softmax(-1)
        del logits
        s = values(numbers).to(p.dtype)
        value = (p * s).sum(-1)
        return value, p.mul_(s - value.unsqueeze(-1)) if needed else None

    of_logits.reads = getattr(values, "reads", ())
    numbers = torch.arange(len(hidden), device=hidden.device)
    return row_values(head, hidden, of_logits, numbers, forbidden=forbidden, where=where)


def embedding_values(weight: Tensor, scale: float, u: Tensor) -> Values:
    """Values ``s[n, v] = scale <u[n], weight[v]>`` of a first-order critic, for `expected_values`.

    From the table [V, D], the factor between its rows and embeddings, and slopes u [N, D] in reward per unit of
    embedding. Values [n, V] are float32 (float64 for a float64 table); as for logits, the product itself is in the
    table's type: a table converted to float32 could be the largest tensor of a step.
    """

    def values(rows: Tensor) -> Tensor:
        return ((scale * u[rows]).to(weight.dtype) @ weight.detach().T).to(wide(weight.dtype))

    values.reads = (weight,)
    return values
