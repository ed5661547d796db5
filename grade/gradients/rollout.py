"""Sampling without gradient, on a key-value cache.

`sample` draws relaxed completions and keeps what is needed to replay them: the hard tokens, the support and its noise,
each [B, T, K] or smaller ([B, T, M, K] with `gumbel_rao`, [B, T, 1] with `st`, whose backward pass reads neither). The
policy's logits [B, V] exist for one position at a time. Ordinary samples come from `grade.models.sampling.generate`.

A completion ends with a hard end-of-sequence token, which still counts. Later positions are masked; draws there affect
no result. The loop always runs the full T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grade.gradients.estimators import RelaxationConfig, find_estimator
from grade.models.batch import PromptBatch
from grade.models.head import weighted_embedding
from grade.models.policy import Policy
from grade.models.sampling import Decoder, check_length, forbid_eos, is_eos


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
    estimator, eos = find_estimator(config.estimator), backbone.eos_token_ids
    rows = []  # of each step: token, whether it counts, support, noise, embedding
    with backbone.merged():
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
                support, noise = estimator.draw_given(logits, config, generator, token)
            rows.append((token, alive, support, noise, e))
            alive = alive & ~is_eos(token, eos)
            if step + 1 < config.max_new_tokens:
                state.advance(e.unsqueeze(1))
        # Within: the phase of a traced step is the rollout's until here.
        ids, mask, *others = (torch.stack(values, 1) for values in zip(*rows, strict=True))
        return Rollout(prompts, ids, mask.long(), *others)
