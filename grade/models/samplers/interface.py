"""The interface of a sampler, what it gives, and how far its policy is from the one that is trained.

Prompts in; token ids, a mask and the tokens' log-probabilities under the sampler out. Tokens, never text: tokenising
the text of a completion need not give back the tokens that were sampled. No top-p, no top-k: those would be samples of
another distribution.

An engine with other kernels, another type or rounding samples a policy q that is not quite the policy p that is
trained. The log-probabilities that it reports tell how far apart they are (`mismatch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.head import wide
from grade.models.sampling import check_length

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch

Row = tuple[Sequence[int], Sequence[float]]
"""A completion's tokens and their log-probabilities."""


@dataclass(frozen=True)
class Samples:
    """Completions of B prompts.

    Attributes:
        ids: Token ids [B, T].
        mask: [B, T], 1 up to and including the first end-of-sequence token, then 0.
        logps: Log-probability of each token under the sampler [B, T] in nats, 0 where masked.
    """

    ids: Tensor
    mask: Tensor
    logps: Tensor


class Sampler:
    """Draws completions of the policy. Subclasses implement `sample`; the rest is for those in other processes.

    Attributes:
        name: The sampler in messages.
    """

    name: str = ""

    def sample(
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        """Sample one completion of each prompt.

        Args:
            backbone: The policy, ``softmax(logits / temperature)`` with its head's temperature.
            prompts: B prompts.
            max_new_tokens: T.
            generator: Source of the noise, or of its seed: the same generator gives the same request.
            min_new_tokens: End-of-sequence is not sampled before this many tokens.

        Returns:
            The completions, [B, T'] with T' <= T.

        Raises:
            InputError: If lengths do not fit the model, or the sampler fails or returns what the policy could not have
                written.
        """
        raise NotImplementedError

    def publish(self, backbone: Backbone) -> Any:
        """Hand the present adapter to the sampler, once before the samples of a step; in one process of several.

        Args:
            backbone: The policy.

        Returns:
            What `use` needs in every process, in plain types.

        Raises:
            InputError: If the sampler does not take it.
        """

    def use(self, published: Any) -> None:
        """Sample from the adapter that `publish` handed over, in this or another process."""

    def close(self) -> None:
        """Give back what the sampler holds for this run."""


@dataclass(frozen=True)
class Mismatch:
    """How far the sampler's policy q is from the trained one, p, on the sampled tokens.

    Attributes:
        mean_ratio: Mean of ``p / q``; its expectation is 1, because the tokens are q's.
        largest_difference: Largest ``|log p - log q|`` in nats.
    """

    mean_ratio: float
    largest_difference: float

    def check(self, bound: float, name: str) -> None:
        """Refuse a sampler whose policy is another one.

        Args:
            bound: Largest difference that is allowed, in nats.
            name: The sampler.

        Raises:
            InputError: If the difference is larger or not a number.
        """
        if not self.largest_difference <= bound:
            largest = f"{self.largest_difference:.3g} nats at one token, mean ratio {self.mean_ratio:.3g}"
            allowed = (
                f"at most sampler_max_difference = {bound:g} nats between the log-probabilities of {name} and the "
                "policy's own: the same weights, adapter, temperature and minimum length (vLLM: --logprobs-mode "
                "processed_logprobs)"
            )
            raise InputError("sampler: largest difference", largest, allowed)


def mismatch(logps: Tensor, samples: Samples) -> Mismatch:
    """Compare log-probabilities of the sampled tokens, averaged over valid tokens in float64.

    Args:
        logps: The policy's own [B, T] (`grade.models.scoring.score`).
        samples: The sampler's.

    Returns:
        Mean ratio and largest difference.
    """
    difference = (logps.double() - samples.logps.double())[samples.mask.bool()]
    return Mismatch(float(difference.exp().mean()), float(difference.abs().max()))


def check_lengths(backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, min_new_tokens: int) -> None:
    """Reject lengths that no sampler can serve.

    Raises:
        InputError: If a length is out of range, or prompt and completion exceed the model's context.
    """
    if max_new_tokens < 1:
        raise InputError("max_new_tokens", max_new_tokens, "at least 1")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise InputError("min_new_tokens", min_new_tokens, f"0 to max_new_tokens = {max_new_tokens}")
    check_length(backbone, prompts.ids.shape[1] + max_new_tokens)


def token_rows(prompts: PromptBatch) -> list[list[int]]:
    """Token ids of each prompt, without padding."""
    pairs = zip(prompts.ids.tolist(), prompts.mask.tolist(), strict=True)
    return [[i for i, m in zip(ids, mask, strict=True) if m] for ids, mask in pairs]


def seed_of(generator: torch.Generator) -> int:
    """A seed in [0, 2^62) for another engine; 2^62 leaves room for seeds that it counts up from this one."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def samples_of(name: str, rows: Sequence[Row], backbone: Backbone, max_new_tokens: int, min_new_tokens: int) -> Samples:
    """Completions of another engine as tensors, cut after the first end-of-sequence token.

    Args:
        name: The engine, for messages.
        rows: Tokens and log-probabilities of each completion.
        backbone: The policy.
        max_new_tokens: T that was asked for.
        min_new_tokens: End-of-sequence was not to come before this many tokens.

    Returns:
        The samples on the policy's device; log-probabilities in float32 or wider.

    Raises:
        InputError: For a completion that the policy could not have written under these settings.
    """
    tokenizer, eos = backbone.tokenizer, set(backbone.eos_token_ids)
    known = backbone.vocab_size if tokenizer is None else min(backbone.vocab_size, len(tokenizer))
    kept = [_checked(name, row, known, eos, max_new_tokens, min_new_tokens) for row in rows]
    shape = (len(kept), max(len(ids) for ids, _ in kept))
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    logps = torch.zeros(shape, dtype=wide(backbone.dtype))
    for n, (tokens, values) in enumerate(kept):
        ids[n, : len(tokens)], mask[n, : len(tokens)] = torch.tensor(tokens), 1
        logps[n, : len(tokens)] = torch.tensor(values, dtype=logps.dtype)
    return Samples(ids.to(backbone.device), mask.to(backbone.device), logps.to(backbone.device))


def _checked(name: str, row: Row, known: int, eos: set[int], longest: int, shortest: int) -> Row:
    ids, logps = row
    field = f"sampler {name}"
    if len(ids) != len(logps):
        raise InputError(field, f"{len(logps)} log-probabilities of {len(ids)} tokens", "one of each token")
    if not 1 <= len(ids) <= longest:
        raise InputError(field, f"{len(ids)} tokens", f"completions of 1 to {longest} tokens")
    for token, logp in zip(ids, logps, strict=True):
        if type(token) is not int or not 0 <= token < known:
            raise InputError(field, token, f"token ids of the policy's tokenizer, 0 to {known - 1}")
        if type(logp) not in (int, float) or not math.isfinite(logp):
            raise InputError(field, logp, "a finite log-probability of each token")
    end = next((n for n, token in enumerate(ids) if token in eos), None)
    if end is not None and end < shortest:
        raise InputError(field, f"an end-of-sequence after {end} tokens", f"none before {shortest} tokens")
    if end is None and len(ids) < longest:
        allowed = (
            f"{longest} tokens, or an end-of-sequence of the policy ({', '.join(map(str, sorted(eos))) or 'none'})"
        )
        raise InputError(field, f"a completion that stops after {len(ids)} tokens", allowed)
    stop = len(ids) if end is None else end + 1
    return ids[:stop], logps[:stop]
