"""One-hot tokens whose backward pass is a surrogate gradient: straight-through and ReinMax."""

from __future__ import annotations

import torch
from torch import Tensor


def reinmax(logits: Tensor, chosen: Tensor, tau: float) -> Tensor:
    """ReinMax: one-hot of the drawn token forward, a second-order accurate gradient backward.

    With ``p = softmax(l)``, ``q = (onehot + softmax(l / tau)) / 2`` and the softmax's Jacobian
    ``J(p) = diag(p) - p p^T``, backward is ``(2 J(q) - J(p) / 2) g``. At tau = 1 its expectation over the token is the
    exact gradient of ``E f(onehot)`` for every quadratic f (Heun's method; straight-through is Euler's).

    Args:
        logits: [..., K], -inf for what cannot be drawn.
        chosen: One-hot of the drawn token [..., K].
        tau: Temperature of the softmax in q.

    Returns:
        ``chosen`` [..., K], in the logits' type.

    Source: Liu et al. 2023, arXiv:2304.08612, algorithm 2.

    >>> l = torch.zeros(2, requires_grad=True)               # p = (1/2, 1/2), q = (3/4, 1/4)
    >>> y = reinmax(l, torch.tensor([1, 0]), 1.0)            # J(p) = +-1/4, J(q) = +-3/16
    >>> y.tolist(), torch.autograd.grad(y[0], l)[0].tolist()  # 2 * 3/16 - 1/2 * 1/4
    ([1.0, 0.0], [0.25, -0.25])
    """
    return _ReinMax.apply(logits, chosen.to(logits.dtype), tau)


class _ReinMax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, chosen: Tensor, tau: float) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1), (chosen + (logits / tau).softmax(-1)) / 2)
        return chosen.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        p, q = ctx.saved_tensors
        first, second = (w * (grad - (w * grad).sum(-1, keepdim=True)) for w in (q, p))
        return 2 * first - second / 2, None, None


def straight_through(z: Tensor, tau: float) -> Tensor:
    """One-hot of the argmax forward, ``softmax(z / tau)``'s gradient backward.

    Args:
        z: Perturbed logits [..., K].
        tau: Gumbel temperature.

    Returns:
        Exactly one-hot weights [..., K].
    """
    return _StraightThrough.apply((z / tau).softmax(-1))


class _StraightThrough(torch.autograd.Function):
    # The usual (hard - soft).detach() + soft is one-hot only up to rounding; this is exact.
    @staticmethod
    def forward(ctx, soft: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad
