"""Relaxation of one token: Gumbel noise, supports, and its estimators.

At one position the policy's logits ``l`` [V] and Gumbel noise ``g`` give ``z = l[I] + g[I]`` on a support ``I`` of K
token ids, and a relaxed token ``y = relax(z / tau)`` [K]:

- `gumbel` (Gumbel-softmax, Jang et al. 2017, arXiv:1611.01144): ``y = softmax(z / tau)``;
- `ste` (straight-through): one-hot of ``argmax z`` forward, the softmax's gradient backward;
- `gumbel_rao`, `reinmax`, `st`: see `grade.gradients.straight_through`.

Each is a subclass of `Estimator`, which `grade.plugins.ESTIMATORS` names. Everything else (engines, method names) asks
that table, so a new estimator is one class and one line.

Two supports: `top_k` takes the K largest logits and then draws noise for them (the source document's);
`perturbed_top_k` draws noise for the whole vocabulary and takes the K largest ``l + g``. With the second the hard token
``argmax z`` is an exact sample of the policy whatever K is (the Gumbel-max trick); with the first it is a sample of the
policy truncated to its K most likely tokens. ``gumbel_topk = 0`` is the full vocabulary.

``tau`` is the Gumbel temperature; the sampling temperature is always 1. Noise is float32 whatever the model's type:
in bfloat16 it would have exact zeros, a mean of 0.557 instead of 0.577, and no values above 5.5.
"""

from __future__ import annotations

import functools
from typing import Annotated

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from grade.config import Config, allowed_names
from grade.errors import InputError
from grade.models.noise import gumbel_noise
from grade.plugins import ESTIMATORS, Support, import_object


def _known(name: str) -> str:
    if name not in ESTIMATORS:
        raise InputError("estimator", name, allowed_names(name, ESTIMATORS))
    return name


EstimatorName = Annotated[str, AfterValidator(_known)]


class RelaxationConfig(Config):
    """Settings of the relaxation."""

    estimator: EstimatorName = Field(
        "ste",
        description="gumbel: soft tokens; ste: hard tokens, soft gradient; gumbel_rao: ste averaged over noise given "
        "the token; reinmax: second-order straight-through; st: straight-through without noise, full vocabulary",
    )
    support: Support = Field(
        "perturbed_top_k",
        description="tokens that are mixed: top_k (largest logits), or perturbed_top_k (largest logits + noise: exact "
        "samples for any K)",
    )
    gumbel_topk: int = Field(256, ge=0, description="size K of the support; 0 = the full vocabulary")
    tau: float = Field(1.0, gt=0, description="Gumbel temperature")
    rao_draws: int = Field(8, ge=1, description="gumbel_rao: draws M of the noise given the token; 1 is ste in law")
    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")
    min_new_tokens: int = Field(0, ge=0, description="end-of-sequence is not sampled before this many tokens")

    def check(self, vocab_size: int) -> None:
        """Reject K > V, and more required tokens than generated ones; a dense estimator has no K."""
        if self.gumbel_topk > vocab_size and not find_estimator(self.estimator).dense:
            raise InputError("gumbel_topk", self.gumbel_topk, f"0 (full vocabulary) to {vocab_size} (vocabulary size)")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens = {self.max_new_tokens}")


class _StraightThroughFunction(torch.autograd.Function):
    # The usual (hard - soft).detach() + soft is one-hot only up to rounding; this is exact.
    @staticmethod
    def forward(ctx, soft: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class Estimator:
    """How a token is relaxed. The base class is straight-through; subclasses override what differs.

    To add an estimator, subclass this and add its import path to `ESTIMATORS`. That also creates the training method
    ``<name>`` with the replay engine.

    Attributes:
        hard: Whether the forward token is one-hot.
        redraws: Whether backward uses supports and noise redrawn given the token instead of those that chose it:
            ``draw_given(logits, config, generator, token)``. Only the replay engine supports that.
        dense: Whether backward goes through the policy's softmax over the whole vocabulary, without noise or tau. Then
            a rollout keeps no support but the token, `relax` only chooses it, and the estimator makes its own
            ``pullback(graph, rollout, config, table)`` in place of `grade.gradients.replay.ReplayGraph.pullback`.
    """

    hard: bool = True
    redraws: bool = False
    dense: bool = False

    @torch.no_grad()
    def draw(self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Support and noise of one position that choose its token.

        Args:
            logits: Policy logits [B, V] in float32 or float64, -inf for forbidden tokens.
            config: Kind and size of the support.
            generator: Source of the noise.

        Returns:
            Token ids and noise, each [B, K] (largest first, except for the full vocabulary). The token has the largest
            ``l + noise``.
        """
        k = config.gumbel_topk or logits.shape[1]
        if k < logits.shape[1] and config.support == "perturbed_top_k":
            noise = gumbel_noise(tuple(logits.shape), generator, logits.device)
            support = (logits + noise).topk(k).indices
            return support, noise.gather(1, support)
        support = likeliest(logits, None, k)
        return support, gumbel_noise(tuple(support.shape), generator, logits.device)

    def relax(self, z: Tensor, tau: float) -> Tensor:
        """Relaxed token [..., K] of perturbed logits ``z = l + g`` [..., K]; see the function `relax`."""
        return _StraightThroughFunction.apply((z / tau).softmax(-1))

    def relax_given(self, logits: Tensor, noise: Tensor, support: Tensor, token: Tensor, tau: float) -> Tensor:
        """Relaxed tokens [N M, K] on the supports of a rollout, for the replayed pass.

        Args:
            logits: Policy logits on the supports [N M, K]; the M draws of a position are consecutive rows.
            noise: [N M, K].
            support: Token ids [N M, K].
            token: The hard tokens [N].
            tau: Gumbel temperature.
        """
        return self.relax(logits + noise, tau)


def likeliest(logits: Tensor, token: Tensor | None, k: int) -> Tensor:
    """Token ids [B, k] of the k largest logits [B, V]; where the token is not among them, it replaces the last."""
    batch, vocab = logits.shape
    if k in (0, vocab):
        return torch.arange(vocab, device=logits.device).expand(batch, vocab)
    if token is not None:
        logits = logits.scatter(1, token.unsqueeze(1), float("inf"))
    return logits.topk(k).indices


class GumbelSoftmax(Estimator):
    """``y = softmax(z / tau)``, forward and backward."""

    hard = False

    def relax(self, z: Tensor, tau: float) -> Tensor:  # noqa: D102
        return (z / tau).softmax(-1)


@functools.cache
def _instance(path: str) -> Estimator:
    return import_object(path)()


def find_estimator(name: str) -> Estimator:
    """The estimator of that name."""
    return _instance(ESTIMATORS[name])


def relax(z: Tensor, tau: float, estimator: str) -> Tensor:
    """Relaxed token ``y`` of perturbed logits.

    Args:
        z: Perturbed logits [..., K].
        tau: Gumbel temperature.
        estimator: ``gumbel`` (softmax), or straight-through: exact one-hot of the argmax forward, softmax backward.

    Returns:
        Weights [..., K] that sum to one.

    >>> z = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    >>> relax(z, 1.0, "ste").tolist()
    [0.0, 0.0, 1.0]
    >>> torch.equal(*(torch.autograd.grad(relax(z, 1.0, e)[0], z)[0] for e in ("ste", "gumbel")))
    True
    """
    return find_estimator(estimator).relax(z, tau)
