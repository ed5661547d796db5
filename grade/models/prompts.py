"""Prompts: from a review to left-padded token ids.

A prompt is the start of a held-out review, as in GRADE (arXiv 2601.11574): its first two sentences, at most 200
characters, at most ``max_prompt_tokens`` tokens. Prompts are padded on the left, so that every completion starts at
the same column and the padding never stands between a prompt and its completion.

Left out: chat templates (the policy continues a review, it does not answer a question) and batching (callers slice
the texts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grade.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode(tokenizer, ids: Tensor, mask: Tensor) -> str:
    """Text of the valid tokens, without special tokens."""
    return tokenizer.decode(ids[mask.bool()].tolist(), skip_special_tokens=True)


@dataclass(frozen=True)
class PromptBatch:
    """A batch of tokenised prompts, padded on the left.

    Attributes:
        ids: Token ids, int64 [B, P]. At padding they are valid ids without meaning.
        mask: 1 at a token, 0 at padding, int64 [B, P].
    """

    ids: Tensor
    mask: Tensor

    def __len__(self) -> int:
        """The number of prompts B."""
        return len(self.ids)

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> PromptBatch:
        """The prompts of these rows, still a batch."""
        return PromptBatch(self.ids[rows], self.mask[rows])

    def repeat(self, times: int) -> PromptBatch:
        """Each prompt ``times`` times in a row, one for each of its completions."""
        return self[torch.arange(len(self), device=self.ids.device).repeat_interleave(times)]

    def mask_with(self, new_tokens: int) -> Tensor:
        """Attention mask [B, P + n] of the prompts followed by n further tokens."""
        return torch.cat([self.mask, self.mask.new_ones(len(self), new_tokens)], 1)

    def to(self, device: torch.device | str) -> PromptBatch:
        """The same batch on another device."""
        return PromptBatch(self.ids.to(device), self.mask.to(device))


def prompt_text(review: str, max_chars: int = 200) -> str:
    """The start of a review that serves as a prompt: two sentences, cut to ``max_chars`` characters.

    A sentence ends at a full stop, whatever comes after it, as in the paper. Unlike there, leading full stops are
    dropped first: the two "sentences" of "...well" would both be empty. White space at the end is dropped too, because
    to most tokenizers it is the beginning of the next word.

    Args:
        review: The text.
        max_chars: The longest prompt, in characters.

    Returns:
        The prompt, never empty.

    Raises:
        InputError: If ``review`` holds nothing but full stops and white space, or ``max_chars`` is less than 1.

    >>> prompt_text("I saw this. Twice. Never again.")
    'I saw this. Twice'
    >>> prompt_text("... so bad it is good!", max_chars=6)
    'so bad'
    """
    if max_chars < 1:
        raise InputError("max_chars", max_chars, "a whole number of at least 1")
    sentences = review.lstrip(". \t\r\n").split(".")[:2]
    prompt = ".".join(sentences)[:max_chars].strip()
    if not prompt:
        raise InputError("prompt", review, "a text with at least one word")
    return prompt


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_prompt_tokens: int, pad_to: int | None = None
) -> PromptBatch:
    """Tokenise prompts, keep the first ``max_prompt_tokens`` tokens of each, pad them on the left.

    Whether a text begins with BOS is up to the tokenizer; BOS counts as a token. A final EOS is removed, because a
    completion follows. Padding uses the id of the padding token, else of EOS, else 0: it may be a real token's, since
    the mask decides.

    Args:
        tokenizer: The policy's tokenizer.
        texts: B prompts.
        max_prompt_tokens: Maximum number of tokens per prompt, at least 1.
        pad_to: The width P. Default: the longest prompt of this batch.

    Returns:
        Ids and mask, int64 [B, P].

    Raises:
        InputError: If there are no prompts, for a prompt without text or without tokens, or if ``max_prompt_tokens``
            is less than 1 or ``pad_to`` less than the longest prompt.
    """
    if max_prompt_tokens < 1:
        raise InputError("max_prompt_tokens", max_prompt_tokens, "a whole number of at least 1")
    texts = list(texts)
    if not texts:
        raise InputError("prompts", texts, "at least one prompt")
    # A prompt of special tokens alone is empty, hence both encodings.
    plain = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    for text, ids in zip(texts, plain, strict=True):
        if not text.strip() or not ids:
            raise InputError("prompt", text, "text (not only white space) of at least one token")
    encoded = tokenizer(texts, truncation=False, padding=False)["input_ids"]
    rows = [_without_eos(ids, tokenizer.eos_token_id)[:max_prompt_tokens] for ids in encoded]
    width = max(map(len, rows))
    if pad_to is not None:
        if pad_to < width:
            raise InputError("pad_to", pad_to, f"at least the {width} tokens of the longest prompt")
        width = pad_to
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    padding = next(token for token in candidates if token is not None)
    ids = torch.full((len(rows), width), padding, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = torch.tensor(tokens)
        mask[row, width - len(tokens) :] = 1
    return PromptBatch(ids, mask)


def position_ids(mask: Tensor) -> Tensor:
    """Positions that count tokens, not padding: ``max(cumsum(mask) - 1, 0)``.

    Args:
        mask: 1 at a token, 0 at padding, [B, L] of any type.

    Returns:
        Positions, int64 [B, L]; 0 at padding before the first token.

    >>> position_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def _without_eos(ids: list[int], eos: int | None) -> list[int]:
    return ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids
