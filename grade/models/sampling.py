"""Sampling: end of sequence, and generation on a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.batch import PromptBatch
from grade.models.noise import Draw, uniform
from grade.models.policy import Policy

BLOCK = 256
"""Tokens in a block of `draw`: about the square root of a vocabulary."""


def forbid_eos(logits: Tensor, ids: Tensor | None, step: int | Tensor, min_new_tokens: int,
               eos: tuple[int, ...]) -> Tensor:  # fmt: skip
    """Set end-of-sequence logits to -inf at steps before ``min_new_tokens``.

    Logits are [..., V], or [..., K] of the token ids ``ids``; ``step`` is the position in the completion, from 0,
    broadcastable to the logits.
    """
    if not eos or min_new_tokens == 0:
        return logits
    ids = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
    ends = is_eos(ids, eos)
    early = torch.as_tensor(step, device=logits.device) < min_new_tokens
    return logits.masked_fill(ends & early, float("-inf"))


def early_rows(mask: Tensor, min_new_tokens: int) -> Tensor | None:
    """Whether each position of completions, flattened [B T], is before ``min_new_tokens``; None if none can be."""
    if min_new_tokens == 0:
        return None
    return (torch.arange(mask.shape[1], device=mask.device) < min_new_tokens).expand(mask.shape).flatten()


def is_eos(ids: Tensor, eos: tuple[int, ...]) -> Tensor:
    """Boolean mask of end-of-sequence tokens, same shape as ``ids``."""
    return torch.isin(ids, torch.tensor(eos, device=ids.device)) if eos else torch.zeros_like(ids, dtype=torch.bool)


@torch.no_grad()
def generate(
    backbone: Policy,
    prompts: PromptBatch,
    max_new_tokens: int,
    generator: torch.Generator | Draw,
    temperature: float = 1.0,
    min_new_tokens: int = 0,
    stop_early: bool = True,
) -> tuple[Tensor, Tensor]:
    """Ordinary samples, each token of ``softmax(l / temperature)``: by one uniform number (`draw`), or by given noise.

    Args:
        backbone: The policy.
        prompts: B prompts.
        max_new_tokens: T.
        generator: Source of the uniform numbers; or a function that gives Gumbel noise g [B, V] for each token in
            turn, which is then ``argmax(l / temperature + g)``. Policies that are alike mostly have the same largest
            entry under the same noise, so that they can be compared.
        temperature: Sampling temperature; 0 is greedy.
        min_new_tokens: End-of-sequence is not sampled before this many tokens.
        stop_early: Stop when every completion has ended.

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
    numbers = None if callable(generator) else uniform((len(prompts), max_new_tokens), generator)
    eos, ids, masks, going = backbone.eos_token_ids, [], [], True
    with backbone.merged():
        state = Decoder(backbone, prompts)
        alive = torch.ones(len(prompts), dtype=torch.bool, device=backbone.device)
        for step in range(max_new_tokens):
            if going:
                logits = state.logits()
                if step < min_new_tokens:
                    logits = forbid_eos(logits, None, step, min_new_tokens, eos)
                if temperature not in (0, 1):
                    logits = logits / temperature
                if temperature > 0 and numbers is not None:
                    token, value = draw(logits, numbers[:, step])
                else:
                    if temperature > 0:
                        logits = logits + generator(tuple(logits.shape))
                    token = logits.argmax(-1)
                    value = logits.gather(-1, token.unsqueeze(-1)).squeeze(-1)
                _check_logits(value, alive)
                ids.append(token)
                masks.append(alive)
                alive = alive & ~is_eos(token, eos)
                going = not stop_early or bool(alive.any())
            # A process whose completions have ended still takes part in the others' passes of a divided base.
            if step + 1 == max_new_tokens or not backbone.anywhere(going):
                break
            state.advance(backbone.embed(token.unsqueeze(1)))
        return torch.stack(ids, 1), torch.stack(masks, 1).long()  # within: the phase of a traced step is the rollout's


def _check_logits(values: Tensor, alive: Tensor) -> None:
    """Reject NaN and infinity among values [B] of the tokens that were chosen, where a completion has not ended."""
    finite = values.isfinite() | ~alive
    if not finite.all():
        rows = f"NaN or infinity for {int((~finite).sum())} of {len(finite)} prompts"
        raise InputError("logits", rows, "a model and an adapter whose logits are finite")


def check_length(backbone: Policy, length: int) -> None:
    """Reject sequences of prompt and completion that are longer than the model's context, in tokens."""
    if length > backbone.max_positions:
        allowed = f"at most {backbone.max_positions} (the model's context)"
        raise InputError("tokens of a prompt and its completion", length, allowed)


class Decoder:
    """Decoding on a key-value cache; a prompt with several completions is read once."""

    def __init__(self, backbone: Policy, prompts: PromptBatch) -> None:
        self.backbone, self.mask, self.cache = backbone, prompts.mask, backbone.new_cache()
        once, rows = prompts.distinct()
        self.last = backbone.decode(backbone.embed(once.ids), once.mask, self.cache)[:, -1]
        if len(once) < len(prompts):
            copies = torch.tensor(rows, device=self.last.device)
            self.last = self.last[copies]
            self.cache.reorder_cache(copies)

    def logits(self) -> Tensor:
        """Logits of the next token [B, V]."""
        return self.backbone.head(self.last)

    def advance(self, embeds: Tensor) -> Tensor:
        """Append embeddings [B, n, D] of tokens; their hidden states [B, n, D]."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(embeds.shape[:2])], 1)
        hidden = self.backbone.decode(embeds, self.mask, self.cache)
        self.last = hidden[:, -1]
        return hidden


def draw(logits: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row's softmax by inverse transform [B], and its log-probability [B], from logits [B, V].

    With weights ``w_v = exp(l_v)``, cumulative sums ``c`` of whole blocks of tokens and the row's number u in [0, 1),
    the block is the first with ``c > u C``, C the sum of all; what is left of u within the block then chooses the token
    in the same way. Blocks, because a cumulative sum over the vocabulary takes three times as long as the weights do;
    one number for a row, because noise for the vocabulary takes as long as two layers. The numbers [B] are float64.
    Log-probabilities are not finite where the logits are not.

    >>> logits = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(4, 3)
    >>> tokens, logps = draw(logits, torch.tensor([0.0, 0.4, 0.5, 0.9], dtype=torch.float64))
    >>> tokens.tolist(), round(float(logps[0].exp()), 6)
    ([0, 0, 2, 2], 0.5)
    """
    batch, vocab = logits.shape
    largest = logits.amax(-1, keepdim=True)
    weights = logits.new_empty(batch, -(-vocab // BLOCK), BLOCK)
    flat = weights.view(batch, -1)
    torch.sub(logits, largest, out=flat[:, :vocab]).exp_()
    flat[:, vocab:] = 0
    sums = weights.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    u = numbers.unsqueeze(-1) * total
    block = torch.searchsorted(ends, u, right=True).clamp(max=ends.shape[1] - 1)
    size = sums.gather(1, block)
    inside = weights.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    rest = (u - ends.gather(1, block) + size) / size * inside[:, -1:]
    token = (block * BLOCK + torch.searchsorted(inside, rest, right=True)).clamp(max=vocab - 1)
    logp = logits.gather(-1, token) - largest - total.log().to(logits.dtype)
    return token.squeeze(-1), logp.squeeze(-1)
