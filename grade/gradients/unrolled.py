"""The step-by-step engines: re-run the whole prefix for each new token and keep the graph.

`unrolled` is the original trainer (`gumbel_legacy`, `ste_legacy`): full-vocabulary soft tokens, stored logits of policy
and reference, a reference that re-reads its prefix. `checkpointed` is the source document's memory-efficient trainer
(Experiment 6) with its eight optimisations. Each is a switch of `StepwiseOptions`, so a notebook can turn it on by
itself.

Two things are fixed, because the results could not be compared otherwise. KL compares policy and reference at the
*same* position and is part of the loss, with its gradient (the original read the reference one position late and left
KL out of the loss). And end-of-sequence is handled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig, find_estimator
from grade.gradients.objective import GradientStep, Objective, check_finite, sequence_mean
from grade.models.backbone import Backbone
from grade.models.batch import PromptBatch
from grade.models.head import EmbeddingTable, entropy_of_logits, kl_divergence, weighted_embedding
from grade.models.sampling import check_length, forbid_eos, is_eos
from grade.plugins import ESTIMATORS


@dataclass(frozen=True)
class StepwiseOptions:
    """The source document's optimisations; the defaults are the original trainer."""

    compact: bool = False  # keep relaxed tokens as K ids and weights; otherwise scatter them into [B, V] at each step
    # KL at each step from the two hidden states; otherwise store both logits [B, T, V] and compare later
    online_kl: bool = False
    reference_cache: bool = False  # decode the reference on a key-value cache; otherwise re-run its prefix at each step
    # ``dense``: soft tokens [B, T, V] times the table; ``gathered``: gather rows [B, T, K, D] and sum (the document's
    # "sparse" reward); ``bagged``: `embedding_bag`, neither
    reward_embedding: Literal["dense", "gathered", "bagged"] = "dense"
    checkpoint: bool = False  # recompute each step's forward pass in backward
    # free each step's dense tensors at once; otherwise hold them to the end, as the original does
    drop_lists: bool = False
    # ``all``: logits of the whole prefix, then the last row, as the original does; ``last``
    head_positions: Literal["all", "last"] = "all"


UNROLLED = StepwiseOptions()
CHECKPOINTED = StepwiseOptions(True, True, True, "bagged", True, True)


def stepwise(
    backbone: Backbone,
    prompts: PromptBatch,
    objective: Objective,
    relaxation: RelaxationConfig,
    generator: torch.Generator,
    scale: float = 1.0,
    *,
    options: StepwiseOptions = UNROLLED,
    backward: bool = True,
) -> GradientStep:
    """Accumulate the exact gradient of the objective by backpropagation through every step.

    Arguments and errors as of `grade.gradients.replay.replay`; also an `InputError` where only that supports the
    estimator. Without ``backward`` it returns with the graph alive in ``loss`` (to measure what it keeps).
    """
    if find_estimator(relaxation.estimator).redraws:
        allowed = " or ".join(name for name in ESTIMATORS if not find_estimator(name).redraws)
        raise InputError("estimator", relaxation.estimator, f"{allowed}; the others need the replay engine")
    objective.require_gradient(relaxation.estimator)
    check_length(backbone, prompts.ids.shape[1] + relaxation.max_new_tokens)
    loop = _Loop(backbone, prompts, relaxation, generator, options)
    for _ in range(relaxation.max_new_tokens):
        loop.step()
    mask = loop.stacked("alive").long()
    e = loop.reward_embeds()
    reward = objective.reward(loop.prompt_embeds, prompts, e, mask, loop.reward_embeds)
    kl = loop.kl() * mask
    loss = -reward.mean() + objective.beta * sequence_mean(kl, mask).mean()
    check_finite(reward, loss)
    ids, entropy = loop.stacked("token"), loop.stacked("entropy") * mask
    if not backward:
        return GradientStep(ids, mask, reward, kl, loss, entropy=entropy)
    (loss * scale).backward(inputs=backbone.trainable_parameters())
    return GradientStep(ids, mask, reward.detach(), kl.detach(), loss.detach(), entropy=entropy)


unrolled = partial(stepwise, options=UNROLLED)
checkpointed = partial(stepwise, options=CHECKPOINTED)


class _Loop:
    """State of one generation."""

    def __init__(
        self, backbone: Backbone, prompts: PromptBatch, config: RelaxationConfig, generator: torch.Generator,
        options: StepwiseOptions,
    ) -> None:  # fmt: skip
        self.backbone, self.config, self.generator, self.options = backbone, config, generator, options
        self.prompt_embeds, self.mask = backbone.embed(prompts.ids).detach(), prompts.mask
        self.alive = torch.ones(len(prompts), dtype=torch.bool, device=backbone.device)
        self.ref_cache = backbone.new_cache() if options.reference_cache else None
        # Of each token its tensors in the graph, held as the options say, even if nothing reads them.
        self.steps: list[dict[str, Tensor | None]] = []

    def step(self) -> None:
        prefix = torch.cat([self.prompt_embeds, *[step["e"].unsqueeze(1) for step in self.steps]], 1)
        ref_hidden = self._reference(prefix.detach())
        draw: list[Tensor] = []  # support and noise: drawn once, reused when the step is recomputed
        # No method of the loop: the graph would hold what holds the graph, and nothing would free either.
        run = partial(_policy, self.backbone, self.config, self.options, self.generator)
        run = partial(run, len(self.steps), self.mask, ref_hidden, draw)
        if self.options.checkpoint:
            step = checkpoint(run, prefix, use_reentrant=False)
        else:
            step = run(prefix)
        support = draw[0]
        token = support.gather(1, step["y"].detach().argmax(-1, keepdim=True)).squeeze(1)
        ref_logits = None if self.options.online_kl else self.backbone.ref_head(ref_hidden)
        self.steps.append(step | {"token": token, "alive": self.alive, "support": support, "ref_logits": ref_logits})
        self.alive = self.alive & ~is_eos(token, self.backbone.eos_token_ids)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)

    @torch.no_grad()
    def _reference(self, prefix: Tensor) -> Tensor:
        """Reference hidden state [B, D] that predicts the next token, from the same inputs as the policy's."""
        with self.backbone.reference():
            if self.ref_cache is None:
                return self.backbone.hidden(prefix, self.mask)[:, -1]
            new = prefix[:, -1:] if self.steps else prefix
            return self.backbone.decode(new, self.mask, self.ref_cache)[:, -1]

    def stacked(self, name: str) -> Tensor:
        """A tensor of all steps [B, T, ...]."""
        return torch.stack([step[name] for step in self.steps], 1)

    def reward_embeds(self, own: EmbeddingTable | None = None) -> Tensor:
        """Completion embeddings [B, T, D] for the reward, from the soft tokens; in its own table if it has one."""
        own = own or EmbeddingTable(self.backbone.embedding_weight, self.backbone.embedding_scale)
        table, scale = own.weight, own.scale
        support, weights = self.stacked("support"), self.stacked("y")  # [B, T, K]
        if self.options.reward_embedding == "bagged":
            e = weighted_embedding(table, support.flatten(0, 1), weights.flatten(0, 1))
            return e.view(*support.shape[:2], -1) * scale
        if self.options.reward_embedding == "gathered":
            return gathered_embedding(table, support, weights) * scale
        if self.options.compact:
            soft = weights.new_zeros(*support.shape[:2], table.shape[0]).scatter(2, support, weights)
        else:
            soft = self.stacked("soft")  # [B, T, V]
        return soft.to(table.dtype) @ table * scale

    def kl(self) -> Tensor:
        """KL [B, T]."""
        if self.options.online_kl:
            return self.stacked("kl")
        logp, ref_logp = self.stacked("logits").log_softmax(-1), self.stacked("ref_logits").log_softmax(-1)  # [B, T, V]
        return (logp.exp() * (logp - ref_logp)).sum(-1)


def _policy(
    backbone: Backbone, config: RelaxationConfig, options: StepwiseOptions, generator: torch.Generator, step: int,
    mask: Tensor, ref_hidden: Tensor, draw: list[Tensor], prefix: Tensor,
) -> dict[str, Tensor | None]:  # fmt: skip
    """One policy step: relaxed embedding e [B, D], weights y [B, K], dense soft token and logits [B, V], KL [B].

    And the entropy [B], of the whole distribution as KL is.
    """
    estimator = find_estimator(config.estimator)
    h = backbone.hidden(prefix, mask)
    last = h[:, -1]
    logits = backbone.head(h)[:, -1] if options.head_positions == "all" else backbone.head(last)  # [B, V]
    allowed = forbid_eos(logits, None, step, config.min_new_tokens, backbone.eos_token_ids)
    if not draw:
        draw.extend(estimator.draw(allowed.detach(), config, generator))
    support, noise = draw
    z = allowed.gather(1, support) + noise
    y = estimator.relax(z, config.tau)
    soft = None
    if options.compact:
        e = weighted_embedding(backbone.embedding_weight, support, y)
    else:
        soft = torch.zeros_like(logits).scatter(1, support, y)
        e = soft.to(backbone.dtype) @ backbone.embedding_weight
    kl = kl_divergence(backbone.head, last, backbone.ref_head, ref_hidden) if options.online_kl else None
    keep_logits = not options.online_kl or not options.drop_lists
    e, entropy = e * backbone.embedding_scale, entropy_of_logits(logits)
    return {"e": e, "y": y, "soft": soft, "logits": logits if keep_logits else None, "kl": kl, "entropy": entropy}


def gathered_embedding(table: Tensor, support: Tensor, weights: Tensor) -> Tensor:
    """The document's sparse reward embedding: gather rows [..., K, D], weigh and sum them.

    From a table [V, D] and weights [..., K] the embedding [..., D]. Kept for backward: the gathered rows, K D numbers
    per token.
    """
    return (weights.to(table.dtype).unsqueeze(-1) * table[support]).sum(-2)
