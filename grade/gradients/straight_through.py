"""Straight-through estimators whose backward pass follows from logits and token alone.

- `gumbel_rao` (Paulus, Maddison and Krause 2021, arXiv:2010.04838): as `ste`, with the softmax's gradient averaged over
  M draws of the noise *given the token*: the same expectation, and never more variance;
- `reinmax` (Liu et al. 2023, arXiv:2304.08612): hard tokens, and a backward pass without noise that is second-order
  accurate (`ste` is first-order);
- `st` (Bengio et al. 2013, arXiv:1308.3432): hard tokens, and a backward pass without noise through the softmax of the
  policy itself over the whole vocabulary: the all-action gradient with a first-order critic
  (`grade.models.head.expected_values`). It has no support and no tau.

`grade.gradients.methods.ESTIMATORS` finds them by import path.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grade.gradients.estimators import Estimator, RelaxationConfig, find_estimator, likeliest
from grade.gradients.replay import Pullback, ReplayGraph
from grade.gradients.rollout import Rollout
from grade.models.gather import whole
from grade.models.head import EmbeddingTable, chunk_rows, embedding_values, expected_values
from grade.models.noise import exponential_noise
from grade.models.sampling import early_rows, forbid_eos


def conditional_noise(logits: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise given that ``argmax(logits + noise)`` is a given entry.

    ``-(l + g)`` is the log of an arrival time at rate ``exp(l)``. The first arrival comes at rate ``Z = sum exp(l)``,
    independently of which entry it is, and the remaining ones restart from there (memoryless):

        z_c = log Z - log E_c,    z_j = log Z - log(E_j Z / exp(l_j) + E_c),    E ~ Exp(1) independent.

    Averaged over ``c ~ softmax(l)`` the noise ``z - l`` is independent standard Gumbel noise. Logits are [N, K], -inf
    for what cannot be drawn, ``chosen`` [N] the index of the drawn entry in each row. The noise [N, K] is in the
    logits' type, 0 where the logit is -inf.
    """
    chosen = chosen.unsqueeze(-1)
    total = logits.logsumexp(-1, keepdim=True)
    times = exponential_noise(tuple(logits.shape), generator, logits.device).to(logits.dtype)
    first = times.gather(-1, chosen)
    z = total - (times * (total - logits).exp() + first).scatter(-1, chosen, first).log()
    return torch.where(logits == float("-inf"), 0.0, z - logits)


def draw_given(
    logits: Tensor, config: RelaxationConfig, generator: torch.Generator, token: Tensor
) -> tuple[Tensor, Tensor]:
    """Support and noise [B, K] of one position given its token [B], which has the largest ``l + noise``."""
    k = config.gumbel_topk or logits.shape[1]
    if k < logits.shape[1] and config.support == "perturbed_top_k":
        noise = conditional_noise(logits, token, generator)
        support = (logits + noise).topk(k).indices
        return support, noise.gather(1, support)
    support = likeliest(logits, token, k)
    chosen = (support == token.unsqueeze(1)).to(torch.uint8).argmax(1)
    return support, conditional_noise(logits.gather(1, support), chosen, generator)


class RaoBlackwellised(Estimator):
    """Straight-through, its gradient averaged over M draws of the noise given the token; supports are [B, M, K]."""

    redraws = True

    def draw_given(  # noqa: D102
        self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        draws = [draw_given(logits, config, generator, token) for _ in range(config.rao_draws)]
        supports, noises = zip(*draws, strict=True)
        return torch.stack(supports, 1), torch.stack(noises, 1)


class _ReinMaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, chosen: Tensor, tau: float) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1), (chosen + (logits / tau).softmax(-1)) / 2)
        return chosen.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        p, q = ctx.saved_tensors
        first, second = (w * (grad - (w * grad).sum(-1, keepdim=True)) for w in (q, p))
        return 2 * first - second / 2, None, None


class ReinMax(Estimator):
    """ReinMax: one-hot of the drawn token forward, a second-order accurate gradient backward, without noise.

    With ``p = softmax(l)``, ``q = (onehot + softmax(l / tau)) / 2`` and the softmax's Jacobian
    ``J(p) = diag(p) - p p^T``, backward is ``(2 J(q) - J(p) / 2) g``. At tau = 1 its expectation over the token is the
    exact gradient of ``E f(onehot)`` for every quadratic f (Heun's method; straight-through is Euler's). The support is
    the likeliest tokens, the token among them. Source: Liu et al. 2023, arXiv:2304.08612, algorithm 2.
    """

    redraws = True

    def draw_given(  # noqa: D102
        self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        support = likeliest(logits, token, config.gumbel_topk)
        return support, torch.zeros_like(support, dtype=logits.dtype)

    def relax_given(  # noqa: D102
        self, logits: Tensor, noise: Tensor, support: Tensor, token: Tensor, tau: float
    ) -> Tensor:
        return _ReinMaxFunction.apply(logits, (support == token.unsqueeze(1)).to(logits.dtype), tau)


class DenseStraightThrough(Estimator):
    """Straight-through without noise: one-hot forward, the softmax of the policy over the whole vocabulary backward.

    ``D^T a`` is the gradient of ``sum_v pi_v <a, e_v>`` over the whole vocabulary, in chunks of rows; nothing of size V
    is kept.
    """

    redraws, dense = True, True

    def draw(  # noqa: D102
        self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        one = config.model_copy(update={"gumbel_topk": 1, "support": "perturbed_top_k"})
        return super().draw(logits, one, generator)

    def draw_given(  # noqa: D102
        self, logits: Tensor | None, config: RelaxationConfig, generator: torch.Generator, token: Tensor
    ) -> tuple[Tensor, Tensor]:
        return token.unsqueeze(-1), torch.zeros_like(token, dtype=torch.float32).unsqueeze(-1)

    def pullback(
        self, graph: ReplayGraph, rollout: Rollout, config: RelaxationConfig, table: EmbeddingTable
    ) -> Pullback:
        """``D`` of ``e = scale * sum_v pi_v E_v``. Each product recomputes the logits, chunk by chunk: none is kept."""
        h, valid = graph.h, rollout.completion_mask.unsqueeze(-1)
        early = early_rows(rollout.completion_mask, config.min_new_tokens)
        head, eos = graph.backbone.head, graph.backbone.eos_token_ids

        def pull(a: Tensor) -> list[Tensor]:
            leaf = h.detach().requires_grad_()
            values = embedding_values(table.weight, table.scale, (a * valid.to(a.dtype)).flatten(0, 1))
            with torch.enable_grad():
                expected = expected_values(head, leaf.flatten(0, 1), values, eos, early)
            return list(torch.autograd.grad(expected.sum(), [leaf, *graph.roots[1:]]))

        return pull


@torch.no_grad()
def redrawn(graph: ReplayGraph, config: RelaxationConfig, generator: torch.Generator) -> Rollout:
    """A graph's rollout with its hard tokens, and with supports and noise for another straight-through estimator.

    The head runs in row chunks, so no [B, T, V] tensor exists; a dense estimator reads no hidden states.
    """
    estimator, backbone = find_estimator(config.estimator), graph.backbone
    given = getattr(estimator, "draw_given", draw_given)
    ids, mask = graph.rollout.completion_ids, graph.rollout.completion_mask
    if estimator.dense:
        support, noise = given(None, config, generator, ids)
        return replace(graph.rollout, support=support, noise=noise)
    with torch.enable_grad():  # the graph keeps its states, which it differentiates later
        rows, flat = graph.h.detach().flatten(0, 1), ids.flatten()
    # A masked position may hold a token that is forbidden there. Draws there affect no result, so none is forbidden.
    steps = torch.where(mask.bool(), torch.arange(ids.shape[1], device=ids.device), config.min_new_tokens)
    draws = []
    with whole(backbone.head.weight):
        for chunk in torch.arange(len(rows), device=ids.device).split(chunk_rows(backbone.vocab_size, len(rows))):
            step = steps.flatten()[chunk].unsqueeze(1)
            logits = forbid_eos(backbone.head(rows[chunk]), None, step, config.min_new_tokens, backbone.eos_token_ids)
            draws.append(given(logits, config, generator, flat[chunk]))
    support, noise = (torch.cat(parts).unflatten(0, ids.shape) for parts in zip(*draws, strict=True))
    return replace(graph.rollout, support=support, noise=noise)
