"""The replay engine: sample without gradient, then one parallel pass and K-hop feedback.

The rollout stores support, noise and embeddings ``e``. One teacher-forced pass over ``[E[x]; e]`` with ``e`` a leaf
gives all hidden states ``h``, hence all ``z`` and ``y``. The full gradient flows ``y_t -> e_t -> h_{>t}``. With
``J = dh/de`` (strictly causal), ``D`` the derivative of the relaxed embeddings by ``h``, ``r = -dR/de`` and
``k = beta dKL/dh``, the adjoint ``a = dL/de`` solves

    a = r + J^T v,    v = D^T a + k,

and ``dL/dtheta = (dh/dtheta)^T v``. Start from ``a = r`` and apply the right-hand side `hops` times: each is one
vector-Jacobian product of the same graph with respect to its inputs. ``J`` is nilpotent (a token cannot change earlier
ones), so ``hops = T`` is exact; ``hops = 0`` cuts the feedback. Each hop adds the influence that passes through one
more generated token.

Policy tokens processed: P + T on the cache, then (P + T) x (forward + (hops + 1) vector-Jacobian products), linear in
T, where re-running the prefix at each step takes sum_t (P + t). Kept for backward: one teacher-forced pass, or with
``gradient_checkpointing`` one input a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grade.errors import InputError
from grade.gradients.estimators import ESTIMATORS, RelaxationConfig
from grade.gradients.objective import GradientStep, Objective, check_finite, sequence_mean
from grade.gradients.rollout import Rollout, condition, noise_given, sample
from grade.models.head import kl_divergence, support_logits, token_logps, weighted_embedding
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.sampling import forbid_eos

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

Pullback = Callable[[Tensor], Tensor]


def replay(
    backbone: Backbone,
    prompts: PromptBatch,
    objective: Objective,
    relaxation: RelaxationConfig,
    generator: torch.Generator,
    scale: float = 1.0,
    *,
    hops: int = 2,
    tolerance: float = 0.0,
    gradient_checkpointing: bool = False,
    rollout: Rollout | None = None,
    completions: tuple[Tensor, Tensor] | None = None,
) -> GradientStep:
    """Accumulate the (hop-truncated) gradient of the objective.

    Args:
        backbone: Policy and reference.
        prompts: B prompts.
        objective: Reward and KL weight.
        relaxation: Estimator, support, tau, lengths.
        generator: Source of the noise.
        scale: Factor on the gradient (1 / number of microbatches).
        hops: Maximum number of feedback hops; T - 1 or more gives the exact gradient.
        tolerance: Stop when ``|a_n - a_{n-1}| <= tolerance |a_n|``; 0 always takes all hops.
        gradient_checkpointing: Recompute each layer in backward; one more forward per vector-Jacobian product.
        rollout: A rollout of the same policy, instead of sampling one.
        completions: Ids and mask [B, T] of completions sampled elsewhere, instead of sampling: see
            `grade.gradients.rollout.condition`. Straight-through estimators only.

    Returns:
        The step's reward, KL, loss, and the residual of the last hop.

    Raises:
        ValueError: If both a rollout and completions are given, or the completions' shapes do not fit.
        InputError: If hops < 0, completions do not fit the policy, or a reward or the loss is not finite.
    """
    if hops < 0:
        raise InputError("hops", hops, "at least 0")
    if completions is not None:
        if rollout is not None:
            raise ValueError("replay takes a rollout or completions, not both")
        rollout = condition(backbone, prompts, *completions, relaxation, generator)
    rollout = rollout or sample(backbone, prompts, relaxation, generator)
    graph = ReplayGraph(backbone, rollout, gradient_checkpointing)
    reward, r = graph.reward(objective)
    kl, k = graph.kl(objective.beta)
    mask = rollout.completion_mask
    loss = -reward.mean() + objective.beta * sequence_mean(kl, mask).mean()
    check_finite(reward, loss)
    v, residual, used = graph.adjoint(r, k, graph.pullback(rollout, relaxation), hops, tolerance)
    torch.autograd.backward(graph.h, v * scale, inputs=backbone.trainable_parameters())
    return GradientStep(rollout.completion_ids, mask, reward, kl, loss, residual, used)


class ReplayGraph:
    """One teacher-forced pass over a rollout, and the VJPs that make up a gradient.

    The graph depends only on the rollout's inputs. Different rewards, numbers of hops and, for hard tokens, estimators
    and temperatures can therefore share it: each takes its own products.

    Args:
        backbone: The policy.
        rollout: Its completions; prompts included.
        gradient_checkpointing: See `replay`.

    Attributes:
        e: Completion embeddings [B, T, D], a leaf.
    """

    def __init__(self, backbone: Backbone, rollout: Rollout, gradient_checkpointing: bool = False) -> None:
        self.backbone, self.rollout = backbone, rollout
        self.prompt_embeds = backbone.embed(rollout.prompts.ids).detach()
        self.e = rollout.embeds.detach().requires_grad_()
        self.inputs = replay_inputs(rollout.prompts, self.prompt_embeds, self.e)
        self.first, self.gradient_checkpointing = rollout.prompts.ids.shape[1] - 1, gradient_checkpointing

    @cached_property
    def h(self) -> Tensor:
        """Hidden states that predict the completion [B, T, D], with graph; computed on first use."""
        with self.backbone.checkpointed_layers(self.gradient_checkpointing):
            return self.backbone.hidden(*self.inputs)[:, self.first :]

    def reward(self, objective: Objective) -> tuple[Tensor, Tensor]:
        """Rewards [B], and ``r = d(-mean R)/de`` [B, T, D]. Call it before using `h`, so only one graph is alive."""
        reward = objective.reward(self.prompt_embeds, self.rollout.prompts, self.e, self.rollout.completion_mask)
        return reward.detach(), torch.autograd.grad(-reward.mean(), self.e)[0]

    def kl(self, beta: float) -> tuple[Tensor, Tensor]:
        """KL [B, T] (0 where masked) and ``k = d(beta * mean KL)/dh`` [B, T, D]."""
        inputs, mask = self.inputs
        with torch.no_grad(), self.backbone.reference():
            ref_hidden = self.backbone.hidden(inputs.detach(), mask)[:, self.first :]  # [B, T, D]
        return _kl_and_gradient(self.backbone, self.h, ref_hidden, self.rollout.completion_mask, beta)

    def given(self, relaxation: RelaxationConfig, generator: torch.Generator) -> Rollout:
        """This rollout's hard tokens, with supports and noise for another straight-through estimator."""
        ids, mask = self.rollout.completion_ids, self.rollout.completion_mask
        support, noise = noise_given(self.backbone, self.h.detach(), ids, mask, relaxation, generator)
        return replace(self.rollout, support=support, noise=noise)

    def policy(self, coefficients: Tensor) -> Tensor:
        """``v = d(sum_b c_b log pi(completion b)) / dh`` [B, T, D] for hard completions: a policy gradient's.

        The graph of the relaxed gradient then also gives the policy gradient, for one more product.

        Args:
            coefficients: c [B], such as advantages / B.
        """
        ids, mask, leaf = self.rollout.completion_ids, self.rollout.completion_mask, self.h.detach().requires_grad_()
        with torch.enable_grad():
            logps = token_logps(self.backbone.head, leaf.flatten(0, 1), ids.flatten()).view(mask.shape) * mask
            return torch.autograd.grad(logps.sum(1) @ coefficients.to(logps), leaf)[0]

    def pullback(self, rollout: Rollout, relaxation: RelaxationConfig) -> Pullback:
        """``a -> D^T a``: from adjoints of relaxed embeddings [B, T, D] to adjoints of hidden states [B, T, D].

        Args:
            rollout: This graph's rollout, or one with the same hard tokens but other supports and noise.
            relaxation: Estimator and tau.
        """
        return _relaxation_pullback(self.backbone, self.h, rollout, relaxation)

    def adjoint(
        self, r: Tensor, k: Tensor | float, pull: Pullback, hops: int, tolerance: float = 0.0
    ) -> tuple[Tensor, Tensor | None, int]:
        """``v = D^T a + k`` after the hops, with the last residual and the number of hops taken.

        Args:
            r: Adjoint of the embeddings without feedback [B, T, D].
            k: Part of the hidden states' adjoint that does not pass through tokens [B, T, D].
            pull: From `pullback`.
            hops: Maximum number of hops.
            tolerance: See `replay`.

        Returns:
            v [B, T, D], the residual (None without a hop), the number of hops.
        """
        step_back = partial(torch.autograd.grad, self.h, self.e, retain_graph=True)
        a, residual, used = r, None, 0
        while used < min(hops, self.e.shape[1] - 1):
            new = r + step_back(grad_outputs=pull(a) + k)[0]
            residual, a, used = (new - a).norm() / new.norm().clamp_min(torch.finfo(new.dtype).tiny), new, used + 1
            if tolerance > 0 and residual <= tolerance:
                break
        return pull(a) + k, residual, used

    def parameter_gradient(self, v: Tensor) -> Tensor:
        """``(dh/dtheta)^T v`` [P] over the flattened adapter parameters; the graph is kept."""
        return flatten(torch.autograd.grad(self.h, self.backbone.trainable_parameters(), v, retain_graph=True))


def replay_inputs(prompts: PromptBatch, prompt_embeds: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced inputs ``[E[x]; e_1 .. e_{T-1}]``: the last token is never fed back.

    Args:
        prompts: B prompts of P tokens.
        prompt_embeds: [B, P, D].
        e: Completion embeddings [B, T, D].

    Returns:
        Inputs [B, P + T - 1, D] and their mask [B, P + T - 1].
    """
    mask = prompts.mask_with(e.shape[1] - 1)
    return torch.cat([prompt_embeds, e[:, :-1]], 1), mask


def _kl_and_gradient(
    backbone: Backbone, h: Tensor, ref_hidden: Tensor, mask: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """KL [B, T] (0 where masked) and ``k = d(beta * mean KL)/dh`` [B, T, D]."""
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        kl = kl_divergence(backbone.head, leaf.flatten(0, 1), ref_hidden.flatten(0, 1)).view(mask.shape) * mask
        (k,) = torch.autograd.grad(beta * sequence_mean(kl, mask).mean(), leaf)
    return kl.detach(), k


def _relaxation_pullback(backbone: Backbone, h: Tensor, rollout: Rollout, config: RelaxationConfig) -> Pullback:
    leaf = h.detach().requires_grad_()
    (batch, length, dim), k = h.shape, rollout.support.shape[-1]
    # Each draw of the noise is a separate row with its own support: [B T M, K].
    draws = rollout.support.shape[2] if rollout.support.ndim == 4 else 1
    support, noise = rollout.support.reshape(-1, k), rollout.noise.reshape(-1, k)
    steps = torch.arange(length, device=h.device).repeat(batch).repeat_interleave(draws).unsqueeze(1)
    with torch.enable_grad():
        rows = leaf.flatten(0, 1)
        logits = support_logits(backbone.head, rows.repeat_interleave(draws, 0) if draws > 1 else rows, support)
        logits = forbid_eos(logits, support, steps, config.min_new_tokens, backbone.eos_token_ids)
        token = rollout.completion_ids.flatten()
        y = ESTIMATORS[config.estimator].relax_given(logits, noise, support, token, config.tau)
        e = weighted_embedding(backbone.embedding_weight, support, y).view(batch, length, draws, dim)
        e = e.mean(2) * backbone.embedding_scale
    valid = rollout.completion_mask.unsqueeze(-1).to(h.dtype)

    def pull(a: Tensor) -> Tensor:
        return torch.autograd.grad(e, leaf, a * valid, retain_graph=True)[0]

    return pull
