"""The replay engine: sample without gradient, then one parallel pass and K-hop feedback.

The rollout stores support, noise and embeddings ``e``. One teacher-forced pass over ``[E[x]; e]`` with ``e`` a leaf
gives all hidden states ``h``, hence all ``z`` and ``y``. The full gradient flows ``y_t -> e_t -> h_{>t}``. With
``J = dh/de`` (strictly causal), ``D`` the derivative of the relaxed embeddings by ``h``, ``r = -dR/de`` and
``k = beta dKL/dh``, the adjoint ``a = dL/de`` solves

    a = r + J^T v,    v = D^T a + k,

and ``dL/dtheta = (dh/dtheta)^T v``. Start from ``a = r`` and apply the right-hand side `hops` times: each is one
vector-Jacobian product of the same graph to its inputs. ``J`` is nilpotent (a token cannot change earlier ones), so
``hops = T`` is exact; ``hops = 0`` cuts the feedback. A hop corrects the adjoint by the influence that passes through
one more generated token.

Policy tokens processed: P + T on the cache, then (P + T) x (forward + (hops + 1) vector-Jacobian products), linear in
T, where re-running the prefix at each step takes sum_t (P + t). Kept for backward: one teacher-forced pass, or with
``gradient_checkpointing`` one input a layer.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from grade.backbone import Backbone
from grade.engines.base import GradientStep, Objective, check_finite, sequence_mean
from grade.errors import InputError
from grade.prompts import PromptBatch
from grade.relaxation import RelaxationConfig, relax
from grade.rollout import Rollout, forbid_eos, sample
from grade.vocab import kl_divergence, support_logits, weighted_embedding


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
) -> GradientStep:
    """Accumulate the (hop-truncated) gradient of the objective.

    Args:
        backbone: Policy and reference.
        prompts: B prompts.
        objective: Reward and KL weight.
        relaxation: Estimator, support, tau, lengths.
        generator: Source of the noise.
        scale: Factor on the gradient (1 / number of microbatches).
        hops: Most feedback hops; T - 1 or more is the exact gradient.
        tolerance: Stop when ``|a_n - a_{n-1}| <= tolerance |a_n|``; 0 takes all hops without looking.
        gradient_checkpointing: Recompute each layer in backward; one more forward per vector-Jacobian product.
        rollout: Use this rollout of the same policy instead of drawing one.

    Returns:
        The step's reward, KL, loss, and the residual of the last hop.

    Raises:
        InputError: If hops < 0, or a reward or the loss is not finite.
    """
    if hops < 0:
        raise InputError("hops", hops, "at least 0")
    rollout = rollout or sample(backbone, prompts, relaxation, generator)
    mask = rollout.completion_mask
    prompt_embeds = backbone.embed(prompts.ids).detach()
    e = rollout.embeds.detach().requires_grad_()  # [B, T, D]
    reward = objective.reward(prompt_embeds, prompts, e, mask)
    (r,) = torch.autograd.grad(-reward.mean(), e)

    inputs, inputs_mask = replay_inputs(prompts, prompt_embeds, e)
    first = prompts.ids.shape[1] - 1
    with torch.no_grad(), backbone.reference():
        ref_hidden = backbone.hidden(inputs.detach(), inputs_mask)[:, first:]  # [B, T, D]
    with backbone.checkpointed_layers(gradient_checkpointing):
        h = backbone.hidden(inputs, inputs_mask)[:, first:]
    kl, k = _kl_and_gradient(backbone, h, ref_hidden, mask, objective.beta)
    loss = -reward.detach().mean() + objective.beta * sequence_mean(kl, mask).mean()
    check_finite(reward, loss)

    pull = _relaxation_pullback(backbone, h, rollout, relaxation)
    step_back = partial(torch.autograd.grad, h, e, retain_graph=True)
    a, residual, used = r, None, 0
    while used < min(hops, relaxation.max_new_tokens - 1):
        new = r + step_back(grad_outputs=pull(a) + k)[0]
        residual, a, used = (new - a).norm() / new.norm().clamp_min(torch.finfo(new.dtype).tiny), new, used + 1
        if tolerance > 0 and residual <= tolerance:
            break
    torch.autograd.backward(h, (pull(a) + k) * scale, inputs=backbone.trainable_parameters())
    return GradientStep(rollout.completion_ids, mask, reward.detach(), kl, loss, residual, used)


def replay_inputs(prompts: PromptBatch, prompt_embeds: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Teacher-forced inputs ``[E[x]; e_1 .. e_{T-1}]``: the last token is never fed back.

    Args:
        prompts: B prompts of P tokens.
        prompt_embeds: [B, P, D].
        e: Completion embeddings [B, T, D].

    Returns:
        Inputs [B, P + T - 1, D] and their mask [B, P + T - 1].
    """
    batch, length = e.shape[:2]
    ones = prompts.mask.new_ones(batch, length - 1)
    return torch.cat([prompt_embeds, e[:, :-1]], 1), torch.cat([prompts.mask, ones], 1)


def _kl_and_gradient(
    backbone: Backbone, h: Tensor, ref_hidden: Tensor, mask: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """KL [B, T] (0 where masked) and ``k = d(beta * mean KL)/dh`` [B, T, D]."""
    leaf = h.detach().requires_grad_()
    with torch.enable_grad():
        kl = kl_divergence(backbone.head, leaf.flatten(0, 1), ref_hidden.flatten(0, 1)).view(mask.shape) * mask
        (k,) = torch.autograd.grad(beta * sequence_mean(kl, mask).mean(), leaf)
    return kl.detach(), k


def _relaxation_pullback(backbone: Backbone, h: Tensor, rollout: Rollout, config: RelaxationConfig):
    """``a -> D^T a``: from adjoints of the relaxed embeddings [B, T, D] to adjoints of the hidden states [B, T, D]."""
    leaf = h.detach().requires_grad_()
    steps = torch.arange(h.shape[1], device=h.device).view(1, -1, 1)
    with torch.enable_grad():
        logits = support_logits(backbone.head, leaf.flatten(0, 1), rollout.support.flatten(0, 1))
        logits = logits.view(rollout.support.shape)
        z = forbid_eos(logits, rollout.support, steps, config, backbone.eos_token_ids) + rollout.noise
        y = relax(z, config.tau, config.estimator)
        e = weighted_embedding(backbone.embedding_weight, rollout.support.flatten(0, 1), y.flatten(0, 1))
        e = e.view(h.shape) * backbone.embedding_scale
    valid = rollout.completion_mask.unsqueeze(-1).to(h.dtype)

    def pull(a: Tensor) -> Tensor:
        return torch.autograd.grad(e, leaf, a * valid, retain_graph=True)[0]

    return pull
