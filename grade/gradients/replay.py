"""The replay engine: sample without gradient, then one parallel pass and K-hop feedback.

The rollout stores support, noise and embeddings ``e``. One parallel pass over ``[E[x]; e]`` with ``e`` a leaf
gives all hidden states ``h``, hence all ``z`` and ``y``. The full gradient flows ``y_t -> e_t -> h_{>t}``. With
``J = dh/de`` (strictly causal), ``D`` the derivative of the relaxed embeddings by ``h``, ``r = -dR/de`` and
``k = beta dKL/dh``, the adjoint ``a = dL/de`` solves

    a = r + J^T v,    v = D^T a + k,

and ``dL/dtheta = (dh/dtheta)^T v``. Start from ``a = r`` and apply the right-hand side `hops` times: each is one
vector-Jacobian product of the same graph with respect to its inputs. ``J`` is nilpotent (a token cannot change earlier
ones), so ``hops = T`` is exact; ``hops = 0`` cuts the feedback. Each hop adds the influence that passes through one
more generated token.

A reward that reads tokens through its own embedding table (a classifier with the policy's vocabulary) receives
``e_R = scale * sum_k y_k E_R[support_k]``. With ``r_R = -dR/de_R`` and ``D_R`` the derivative of ``e_R`` by ``h``, it
adds ``D_R^T r_R`` to ``k`` and nothing to ``r``; rewards of both kinds add up.

A trained token bias b enters the logits beside ``h``. So where it is trained, D and k have a part for it as well, and
``dL/db`` is b's part of ``v``: adjoints of `ReplayGraph.roots` are lists of one tensor, or two.

Policy tokens processed: P + T on the cache, then (P + T) x (forward + (hops + 1) vector-Jacobian products), linear in
T, where re-running the prefix at each step takes sum_t (P + t). Kept for backward: one parallel pass, or with
``gradient_checkpointing`` one input a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig, find_estimator
from grade.gradients.objective import GradientStep, Objective, check_finite, sequence_mean
from grade.gradients.rollout import Rollout, sample
from grade.models.batch import PromptBatch
from grade.models.gather import whole
from grade.models.head import EmbeddingTable, support_logits, weighted_embedding
from grade.models.policy import Policy
from grade.models.sampling import forbid_eos
from grade.models.scoring import hidden_logps, kl_and_entropy

Pullback = Callable[[Tensor], list[Tensor]]
"""From adjoints of relaxed embeddings [B, T, D] to those of a graph's roots."""


def replay(
    backbone: Policy,
    prompts: PromptBatch,
    objective: Objective,
    relaxation: RelaxationConfig,
    generator: torch.Generator,
    scale: float = 1.0,
    *,
    hops: int = 2,
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
        hops: Number of feedback hops; T - 1 or more gives the exact gradient.
        gradient_checkpointing: Recompute each layer in backward; one more forward per vector-Jacobian product.
        rollout: A rollout of the same policy, instead of sampling one.

    Returns:
        The step's reward, KL, loss, and the residual of the last hop.

    Raises:
        InputError: If hops < 0, a reward has no gradient, or a reward or the loss is not finite.
    """
    if hops < 0:
        raise InputError("hops", hops, "at least 0")
    objective.require_gradient(relaxation.estimator)
    rollout = rollout or sample(backbone, prompts, relaxation, generator)
    graph = ReplayGraph(backbone, rollout, gradient_checkpointing)
    reward, r, k_reward = graph.reward(objective, relaxation)
    kl, entropy, k = graph.kl(objective.beta)
    k = k if k_reward is None else _plus(k, k_reward)
    mask = rollout.completion_mask
    loss = -reward.mean() + objective.beta * sequence_mean(kl, mask).mean()
    check_finite(reward, loss)
    v, residual = graph.adjoint(r, k, graph.pullback(rollout, relaxation), hops)
    torch.autograd.backward(graph.roots, [each * scale for each in v], inputs=backbone.trainable_parameters())
    return GradientStep(rollout.completion_ids, mask, reward, kl, loss, residual, entropy=entropy)


class ReplayGraph:
    """One parallel pass over a rollout, and the VJPs that make up a gradient.

    The graph depends only on the rollout's inputs. Different rewards, numbers of hops and, for hard tokens, estimators
    and temperatures can therefore share it: each takes its own products.
    """

    def __init__(self, backbone: Policy, rollout: Rollout, gradient_checkpointing: bool = False) -> None:
        self.backbone, self.rollout = backbone, rollout
        self.prompt_embeds = backbone.embed(rollout.prompts.ids).detach()
        self.e = rollout.embeds.detach().requires_grad_()  # [B, T, D], a leaf
        self.inputs = replay_inputs(rollout.prompts, self.prompt_embeds, self.e)
        self.first, self.gradient_checkpointing = rollout.prompts.ids.shape[1] - 1, gradient_checkpointing

    @property
    def roots(self) -> list[Tensor]:
        """What the policy's logits are made of and is trained: hidden states, and the token bias [V] if it is."""
        bias = self.backbone.head.token_bias
        return [self.h, bias] if bias is not None and bias.requires_grad else [self.h]

    def _leaves(self) -> list[Tensor]:
        return [self.h.detach().requires_grad_(), *self.roots[1:]]

    @cached_property
    def h(self) -> Tensor:
        """Hidden states that predict the completion [B, T, D], with graph; computed on first use."""
        with self.backbone.checkpointed_layers(self.gradient_checkpointing):
            return self.backbone.hidden(*self.inputs)[:, self.first :]

    def reward(
        self, objective: Objective, relaxation: RelaxationConfig | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor] | None]:
        """Rewards and their adjoints. Call it before using `h`, so only one graph is alive.

        Returns rewards [B]; ``r = d(-mean R)/de`` [B, T, D], 0 if nothing reads the policy's embeddings; and
        ``sum_R D_R^T r_R``, adjoints of `roots`, over rewards with tables of their own, None without. Only those need
        the relaxation.
        """
        others: list[tuple[EmbeddingTable, Tensor]] = []  # each own table and its e_R

        def own(table: EmbeddingTable) -> Tensor:
            if find_estimator(relaxation.estimator).hard:
                e = table.embed(self.rollout.completion_ids)
            else:
                e = self._relaxed(self.h.detach(), self.rollout, relaxation, table)
            others.append((table, e.requires_grad_()))
            return e

        mask = self.rollout.completion_mask
        reward = objective.reward(self.prompt_embeds, self.rollout.prompts, self.e, mask, own)
        leaves = [self.e, *(e for _, e in others)]
        r, *r_others = torch.autograd.grad(-reward.mean(), leaves, materialize_grads=True)
        reward, k = reward.detach(), None
        for (table, _), r_own in zip(others, r_others, strict=True):
            part = self.pullback(self.rollout, relaxation, table)(r_own)
            k = part if k is None else _plus(k, part)
        return reward, r, k

    def kl(self, beta: float) -> tuple[Tensor, Tensor, list[Tensor]]:
        """KL and the policy's entropy [B, T] (0 where masked), and ``k = d(beta * mean KL)/d roots``."""
        inputs, mask = self.inputs
        with torch.no_grad(), self.backbone.reference():
            ref_hidden = self.backbone.hidden(inputs.detach(), mask)[:, self.first :]  # [B, T, D]
        mask, leaves = self.rollout.completion_mask, self._leaves()
        with torch.enable_grad():
            kl, entropy = kl_and_entropy(self.backbone, leaves[0], ref_hidden, mask)
            k = torch.autograd.grad(beta * sequence_mean(kl, mask).mean(), leaves)
        return kl.detach(), entropy, list(k)

    def policy(self, coefficients: Tensor) -> list[Tensor]:
        """``v = d(sum_b c_b log pi(completion b)) / d roots`` for hard completions: a policy gradient's.

        The coefficients c [B] are such as advantages / B. The graph of the relaxed gradient then also gives the policy
        gradient, for one more product.
        """
        ids, mask, leaves = self.rollout.completion_ids, self.rollout.completion_mask, self._leaves()
        with torch.enable_grad():
            logps = hidden_logps(self.backbone, leaves[0], ids, mask)
            return list(torch.autograd.grad(logps.sum(1) @ coefficients.to(logps), leaves))

    def pullback(self, rollout: Rollout, relaxation: RelaxationConfig, table: EmbeddingTable | None = None) -> Pullback:
        """``a -> D^T a``: from adjoints of relaxed embeddings [B, T, D] to adjoints of `roots`.

        The rollout is this graph's, or one with the same hard tokens but other supports and noise. With a reward's own
        table, adjoints are [B, T, D_R].
        """
        table = table or EmbeddingTable(self.backbone.embedding_weight, self.backbone.embedding_scale)
        estimator = find_estimator(relaxation.estimator)
        if estimator.dense:
            return estimator.pullback(self, rollout, relaxation, table)
        leaves, tables = self._leaves(), (self.backbone.embedding_weight, self.backbone.head.weight)
        with torch.enable_grad(), whole(*tables):
            e = self._relaxed(leaves[0], rollout, relaxation, table)
        valid = rollout.completion_mask.unsqueeze(-1).to(e.dtype)

        def pull(a: Tensor) -> list[Tensor]:
            with whole(*tables):
                return list(torch.autograd.grad(e, leaves, a * valid, retain_graph=True))

        return pull

    def _relaxed(self, h: Tensor, rollout: Rollout, config: RelaxationConfig, table: EmbeddingTable) -> Tensor:
        """Relaxed tokens in a table [B, T, D_R], differentiable in the hidden states."""
        (batch, length, _), k = h.shape, rollout.support.shape[-1]
        # Each draw of the noise is a separate row with its own support: [B T M, K].
        draws = rollout.support.shape[2] if rollout.support.ndim == 4 else 1
        support, noise = rollout.support.reshape(-1, k), rollout.noise.reshape(-1, k)
        steps = torch.arange(length, device=h.device).repeat(batch).repeat_interleave(draws).unsqueeze(1)
        rows, head = h.flatten(0, 1), self.backbone.head
        logits = support_logits(head, rows.repeat_interleave(draws, 0) if draws > 1 else rows, support)
        logits = forbid_eos(logits, support, steps, config.min_new_tokens, self.backbone.eos_token_ids)
        token = rollout.completion_ids.flatten()
        y = find_estimator(config.estimator).relax_given(logits, noise, support, token, config.tau)
        e = weighted_embedding(table.weight, support, y).view(batch, length, draws, -1)
        return e.mean(2) * table.scale

    def adjoint(self, r: Tensor, k: list[Tensor], pull: Pullback, hops: int) -> tuple[list[Tensor], Tensor | None]:
        """``v = D^T a + k`` after the hops, and the last residual (None without a hop).

        r [B, T, D] is the adjoint of the embeddings without feedback, k the part of the adjoint of `roots` that does
        not pass through tokens, ``pull`` from `pullback`; hops as for `replay`.
        """
        step_back = partial(torch.autograd.grad, self.h, self.e, retain_graph=True)
        a, residual = r, None
        for _ in range(min(hops, self.e.shape[1] - 1)):
            new = r + step_back(grad_outputs=pull(a)[0] + k[0])[0]
            residual, a = (new - a).norm() / new.norm().clamp_min(torch.finfo(new.dtype).tiny), new
        return _plus(pull(a), k), residual

    def parameter_gradient(self, v: list[Tensor]) -> Tensor:
        """``(d roots/dtheta)^T v`` [P] over the flattened trained parameters; the graph is kept."""
        grads = torch.autograd.grad(self.roots, self.backbone.trainable_parameters(), v, retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads])


def _plus(one: list[Tensor], other: list[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(one, other, strict=True)]


def replay_inputs(prompts: PromptBatch, prompt_embeds: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of the pass ``[E[x]; e_1 .. e_{T-1}]`` [B, P + T - 1, D] and their mask; the last token is not fed.

    From prompt embeddings [B, P, D] and completion embeddings [B, T, D].
    """
    mask = prompts.mask_with(e.shape[1] - 1)
    return torch.cat([prompt_embeds, e[:, :-1]], 1), mask
