"""The relaxation of one token: Gumbel noise, supports and estimators.

At one position the policy's logits ``l`` [V] and Gumbel noise ``g`` give ``z = l[I] + g[I]`` on a support ``I`` of K
token ids, and a relaxed token ``y = relax(z / tau)`` [K]:

- `gumbel` (Gumbel-softmax, Jang et al. 2017, arXiv:1611.01144): ``y = softmax(z / tau)``;
- `ste` (straight-through): one-hot of ``argmax z`` forward, the softmax's gradient backward.

Two supports: `top_k` takes the K largest logits and then draws noise for them (the source document's);
`perturbed_top_k` draws noise for the whole vocabulary and takes the K largest ``l + g``. With the second the hard token
``argmax z`` is an exact sample of the policy whatever K is (the Gumbel-max trick); with the first it is a sample of the
policy truncated to its K most likely tokens. ``gumbel_topk = 0`` is the full vocabulary.

``tau`` is the Gumbel temperature; the sampling temperature is always 1. Noise is float32 whatever the model's type:
drawn in bfloat16 it has exact zeros, a mean of 0.557 instead of 0.577 and no values above 5.5.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError

Estimator = Literal["gumbel", "ste"]
Support = Literal["top_k", "perturbed_top_k"]


class RelaxationConfig(Config):
    """How generated tokens are relaxed."""

    estimator: Estimator = Field("ste", description="gumbel: soft tokens; ste: hard tokens, soft gradient")
    support: Support = Field(
        "perturbed_top_k",
        description="tokens that are mixed: top_k (largest logits), or perturbed_top_k (largest logits + noise: exact "
        "samples for any K)",
    )
    gumbel_topk: int = Field(256, ge=0, description="size K of the support; 0 = the full vocabulary")
    tau: float = Field(1.0, gt=0, description="Gumbel temperature")
    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")
    min_new_tokens: int = Field(0, ge=0, description="end-of-sequence is not sampled before this many tokens")

    def check(self, vocab_size: int) -> None:
        """Check against a model's vocabulary.

        Args:
            vocab_size: V.

        Raises:
            InputError: If K > V or more tokens are required than generated.
        """
        if self.gumbel_topk > vocab_size:
            raise InputError("gumbel_topk", self.gumbel_topk, f"0 (full vocabulary) to {vocab_size} (vocabulary size)")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens = {self.max_new_tokens}")


def gumbel_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """Standard Gumbel noise ``-log(Exp(1))`` in float32.

    Args:
        shape: Shape of the noise.
        generator: Seeded generator; the same seed gives the same noise.
        device: The generator's own, which is the default, or meta: noise without data.

    Returns:
        Noise with mean 0.5772 (Euler's constant) and variance pi^2 / 6.
    """
    empty = torch.empty(shape, dtype=torch.float32, device=device or generator.device)
    return empty.exponential_(generator=generator).clamp_min_(torch.finfo(torch.float32).tiny).log_().neg_()


@torch.no_grad()
def draw_support(logits: Tensor, config: RelaxationConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw noise and choose the support of one position.

    Args:
        logits: Policy logits [B, V] in float32 or float64, -inf for forbidden tokens.
        config: Kind and size of the support.
        generator: Source of the noise.

    Returns:
        Token ids [B, K] (largest first, except for the full vocabulary) and their noise [B, K] in float32.
    """
    batch, vocab = logits.shape
    k, device = config.gumbel_topk, logits.device
    if k == 0 or k == vocab:
        return torch.arange(vocab, device=device).expand(batch, vocab), gumbel_noise((batch, vocab), generator, device)
    if config.support == "top_k":
        return logits.topk(k).indices, gumbel_noise((batch, k), generator, device)
    noise = gumbel_noise((batch, vocab), generator, device)
    support = (logits + noise).topk(k).indices
    return support, noise.gather(1, support)


def relax(z: Tensor, tau: float, estimator: Estimator) -> Tensor:
    """Relaxed token ``y`` of perturbed logits.

    Args:
        z: Perturbed logits [..., K].
        tau: Gumbel temperature.
        estimator: ``gumbel`` (softmax) or ``ste`` (exact one-hot of the argmax forward, softmax backward).

    Returns:
        Weights [..., K] that sum to one.

    >>> z = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    >>> relax(z, 1.0, "ste").tolist()
    [0.0, 0.0, 1.0]
    >>> torch.equal(*(torch.autograd.grad(relax(z, 1.0, e)[0], z)[0] for e in ("ste", "gumbel")))
    True
    """
    soft = (z / tau).softmax(-1)
    return _StraightThrough.apply(soft) if estimator == "ste" else soft


class _StraightThrough(torch.autograd.Function):
    # The usual (hard - soft).detach() + soft is one-hot only up to rounding; this is exact.
    @staticmethod
    def forward(ctx, soft: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def tau_at(step: int, start: float, end: float, anneal_steps: int) -> float:
    """Linear temperature schedule: ``start`` at step 0, ``end`` from step ``anneal_steps`` on.

    Args:
        step: Optimizer step, from 0.
        start: First temperature.
        end: Last temperature.
        anneal_steps: Length of the ramp; 0 means ``end`` from the first step.

    Returns:
        The temperature.

    >>> [tau_at(s, 2.0, 0.5, 100) for s in (0, 50, 100, 1000)]
    [2.0, 1.25, 0.5, 0.5]
    """
    if anneal_steps <= 0:
        return end
    return start + (end - start) * min(step / anneal_steps, 1.0)
