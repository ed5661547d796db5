"""Sampling: end of sequence, and generation on a key-value cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.decode_linear import skinny_products
from grade.models.noise import Draw, gumbel_noise

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch


def forbid_eos(logits: Tensor, ids: Tensor | None, step: int | Tensor, min_new_tokens: int,
               eos: tuple[int, ...]) -> Tensor:  # fmt: skip
    """Set end-of-sequence logits to -inf at steps before ``min_new_tokens``.

    Args:
        logits: Logits [..., V], or [..., K] with ``ids``.
        ids: Token ids of the logits, same shape; None if they are 0..V-1.
        step: Position in the completion, from 0, broadcastable to ``logits``.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        eos: End-of-sequence ids.

    Returns:
        The logits, masked where needed.
    """
    if not eos or min_new_tokens == 0:
        return logits
    ids = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    is_eos = torch.isin(ids, torch.tensor(eos, device=logits.device))
    early = torch.as_tensor(step, device=logits.device) < min_new_tokens
    return logits.masked_fill(is_eos & early, float("-inf"))


def is_eos(ids: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Boolean mask of end-of-sequence tokens, same shape as ``ids``."""
    return torch.isin(ids, torch.tensor(eos, device=ids.device)) if eos else torch.zeros_like(ids, dtype=torch.bool)


@torch.no_grad()
def generate(
    backbone: Backbone,
    prompts: PromptBatch,
    max_new_tokens: int,
    generator: torch.Generator | Draw,
    temperature: float = 1.0,
    min_new_tokens: int = 0,
    stop_early: bool = True,
    logps: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Ordinary samples: ``argmax(l / temperature + g)``, an exact sample of ``softmax(l / temperature)``.

    Args:
        backbone: The policy.
        prompts: B prompts.
        max_new_tokens: T.
        generator: Source of the noise, or the noise itself.
        temperature: Sampling temperature; 0 is greedy.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        stop_early: Stop when every completion has ended.
        logps: A list that gets each position's log-probabilities [B] of its tokens; not for greedy completions.

    Returns:
        Completion ids and mask, each [B, T'] with T' <= T.

    Raises:
        InputError: If a length or the temperature is out of range, or the logits are not finite.
    """
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", max_new_tokens, "at least 1")
    if not 0 <= temperature < float("inf"):
        raise InputError("temperature", temperature, "a finite number, at least 0")
    check_length(backbone, prompts.ids.shape[1] + max_new_tokens)
    with backbone.merged(), skinny_products(backbone.embedding_weight):
        return _generate(backbone, prompts, max_new_tokens, min_new_tokens, generator, temperature, stop_early, logps)


def _generate(
    backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, min_new_tokens: int,
    generator: torch.Generator | Draw, temperature: float, stop_early: bool, logps: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    state, eos = Decoder(backbone, prompts), backbone.eos_token_ids
    alive = torch.ones(len(prompts), dtype=torch.bool, device=backbone.device)
    ids, masks, going = [], [], True
    for step in range(max_new_tokens):
        if going:
            logits = forbid_eos(state.logits(), None, step, min_new_tokens, eos)
            if temperature > 0:
                shape = tuple(logits.shape)
                noise = generator(shape) if callable(generator) else gumbel_noise(shape, generator)
                plain = None if logps is None else logits  # otherwise it is freed here
                logits = logits / temperature + noise
            token = logits.argmax(-1)
            if logps is not None:
                values = (plain / temperature).log_softmax(-1)
                logps.append(values.gather(-1, token.unsqueeze(-1)).squeeze(-1))
            check_finite(logits.gather(-1, token.unsqueeze(-1)).squeeze(-1), alive)
            ids.append(token)
            masks.append(alive)
            alive = alive & ~is_eos(token, eos)
            going = not stop_early or bool(alive.any())
        # A process whose completions have ended still takes part in the others' passes of a sharded base.
        if step + 1 == max_new_tokens or not backbone.anywhere(going):
            break
        state.advance(backbone.embed(token))
    return torch.stack(ids, 1), torch.stack(masks, 1).long()


def check_finite(largest: Tensor, alive: Tensor) -> None:
    """Reject NaN and infinity among the largest logits [B]; where there is NaN, arg max takes it for the largest."""
    finite = largest.isfinite() | ~alive
    if not finite.all():
        rows = f"NaN or infinity for {int((~finite).sum())} of {len(finite)} prompts"
        raise InputError("logits", rows, "a model and an adapter whose logits are finite")


def check_length(backbone: Backbone, length: int) -> None:
    """Reject sequences longer than the model's context.

    Args:
        backbone: The model.
        length: Prompt plus completion, in tokens.

    Raises:
        InputError: If it does not fit.
    """
    if length > backbone.max_positions:
        allowed = f"at most {backbone.max_positions} (the model's context)"
        raise InputError("max_prompt_tokens + max_new_tokens", length, allowed)


class Decoder:
    """Decoding, one position at a time, on a key-value cache."""

    def __init__(self, backbone: Backbone, prompts: PromptBatch) -> None:
        self.backbone, self.mask, self.cache = backbone, prompts.mask, backbone.new_cache()
        self.last = backbone.decode(backbone.embed(prompts.ids), self.mask, self.cache)[:, -1]

    def logits(self) -> Tensor:
        """Logits of the next token [B, V]."""
        return self.backbone.head(self.last)

    def advance(self, embeds: Tensor) -> None:
        """Append a token's embeddings [B, D]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        self.last = self.backbone.decode(embeds.unsqueeze(1), self.mask, self.cache)[:, 0]
