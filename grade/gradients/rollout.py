"""Sampling without gradient, on a key-value cache.

`sample` draws relaxed completions and keeps what is needed to replay them: the hard tokens, the support and its noise,
each [B, T, K] or smaller ([B, T, M, K] with `gumbel_rao`, [B, T, 1] with `st`, whose backward pass reads neither). The
policy's logits [B, V] exist for one position at a time. Ordinary samples,
for evaluation, come from `grade.models.sampling.generate`.

A completion ends with a hard end-of-sequence token, which still counts. Later positions are masked; draws there affect
no result. The loop always runs the full T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grade.errors import InputError
from grade.gradients.estimators import ESTIMATORS, RelaxationConfig
from grade.models.gather import whole
from grade.models.head import chunk_rows, weighted_embedding
from grade.models.policy import Policy
from grade.models.prompts import PromptBatch
from grade.models.sampling import Decoder, check_length, forbid_eos, is_eos, skinny_products


@dataclass(frozen=True)
class Rollout:
    """Relaxed completions of a batch of prompts."""

    prompts: PromptBatch
    completion_ids: Tensor  # hard tokens ``argmax z`` [B, T]
    completion_mask: Tensor  # [B, T], 1 up to and including the first end-of-sequence token, then 0
    support: Tensor  # token ids of the supports [B, T, K]; with `gumbel_rao` one per draw [B, T, M, K]
    # Gumbel noise on the supports, same shape; float32, or the type of the logits if drawn given the token
    noise: Tensor
    embeds: Tensor  # embeddings ``e`` [B, T, D] of the hard tokens; for `gumbel`, of the soft ones


@torch.no_grad()
def sample(backbone: Policy, prompts: PromptBatch, config: RelaxationConfig, generator: torch.Generator) -> Rollout:
    """Draw relaxed completions of the policy.

    Args:
        backbone: The policy.
        prompts: B prompts.
        config: Estimator, support, tau, lengths.
        generator: Source of the noise, on the backbone's device.

    Returns:
        The rollout.

    Raises:
        InputError: If the settings do not fit the vocabulary, or prompt and completion the context.
    """
    config.check(backbone.vocab_size)
    check_length(backbone, prompts.ids.shape[1] + config.max_new_tokens)
    estimator, eos = ESTIMATORS[config.estimator], backbone.eos_token_ids
    rows = []  # of each step: token, whether it counts, support, noise, embedding
    with backbone.merged(), skinny_products(backbone.embedding_weight):
        state = Decoder(backbone, prompts)
        alive = torch.ones(len(prompts), dtype=torch.bool, device=backbone.device)
        for step in range(config.max_new_tokens):
            logits = forbid_eos(state.logits(), None, step, config.min_new_tokens, eos)  # [B, V]
            support, noise = estimator.draw(logits, config, generator)  # [B, K]
            y = estimator.relax(logits.gather(1, support) + noise, config.tau)
            token = support.gather(1, y.argmax(-1, keepdim=True)).squeeze(1)  # [B]
            if estimator.hard:
                e = backbone.embed(token)
            else:
                e = weighted_embedding(backbone.embedding_weight, support, y) * backbone.embedding_scale
            if estimator.redraws:
                support, noise = estimator.draw(logits, config, generator, token)
            rows.append((token, alive, support, noise, e))
            alive = alive & ~is_eos(token, eos)
            if step + 1 < config.max_new_tokens:
                state.advance(e)
        # Within: the phase of a traced step is the rollout's until here.
        ids, mask, *others = (torch.stack(values, 1) for values in zip(*rows, strict=True))
        return Rollout(prompts, ids, mask.long(), *others)


@torch.no_grad()
def noise_given(
    backbone: Policy, hidden: Tensor | None, ids: Tensor, mask: Tensor, config: RelaxationConfig,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`Estimator.draw` given completions [B, T], from the hidden states [B, T, D] that predict their tokens.

    Supports and noise are [B, T, K] or [B, T, M, K]. The head runs in row chunks, so no [B, T, V] tensor exists; a
    dense estimator reads neither it nor the hidden states.
    """
    estimator = ESTIMATORS[config.estimator]
    if not estimator.hard:
        hard = ", ".join(name for name, other in ESTIMATORS.items() if other.hard)
        raise InputError("estimator", config.estimator, f"{hard}: soft tokens are not determined by text")
    if estimator.dense:
        return estimator.draw(None, config, generator, ids)
    rows, flat = hidden.flatten(0, 1), ids.flatten()
    # A masked position may hold a token that is forbidden there. Draws there affect no result, so none is forbidden.
    steps = torch.where(mask.bool(), torch.arange(ids.shape[1], device=ids.device), config.min_new_tokens)
    draws = []
    with whole(backbone.head.weight):
        for chunk in torch.arange(len(rows), device=ids.device).split(chunk_rows(backbone.vocab_size, len(rows))):
            logits = backbone.head(rows[chunk])
            step = steps.flatten()[chunk].unsqueeze(1)
            logits = forbid_eos(logits, None, step, config.min_new_tokens, backbone.eos_token_ids)
            draws.append(estimator.draw(logits, config, generator, flat[chunk]))
    return tuple(torch.cat(parts).unflatten(0, ids.shape) for parts in zip(*draws, strict=True))
