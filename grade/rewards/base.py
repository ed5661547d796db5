"""The base class of rewards, and the one rule for which text they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grade.config import RewardScope
from grade.errors import InputError
from grade.models.batch import PromptBatch
from grade.models.head import EmbeddingTable

if TYPE_CHECKING:
    from grade.models.policy import Policy


class Reward:
    """A reward of completions: a value for each, and for some kinds a gradient.

    A subclass implements `score`, or, where tokens can be relaxed, ``differentiable(embeds, mask)``: embeddings
    [B, L, D] and mask [B, L] to rewards [B]. `score` then follows from it.

    Attributes:
        name: How it is logged.
        scope: Which text `differentiable` reads, and `score` with it; None: a reward that has only a `score`, which
            gets prompts and completions and takes what it needs.
        reads: The embedding table that `differentiable` reads; None: the policy's.
        kind: ``bag`` if it reads the embedding table and no transformer; names a reward that has no name.
        differentiable: None: the reward has values only.
        no_gradient: Why it has values only, for error messages.
        of_policy: Whether a completion's value changes with the policy.
        last: Of a sum: its parts' `grade.rewards.rewards.Scores` for the last batch.
    """

    name: str = "reward"
    scope: RewardScope | None = None
    reads: EmbeddingTable | None = None
    kind: str | None = None
    differentiable: Callable[[Tensor, Tensor], Tensor] | None = None
    no_gradient: str = "a reward of text, which has no gradient"
    of_policy: bool = False
    last: Any = None

    @torch.no_grad()
    def score(self, policy: Policy, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards of hard completions, without gradient.

        Args:
            policy: The policy: its tokenizer, and its embeddings where the reward has no table of its own.
            prompts: B prompts.
            ids: Completions [B, T].
            mask: [B, T], 0 after the end of a completion.

        Returns:
            [B].
        """
        embed = policy.embed if self.reads is None else self.reads.embed
        text, text_mask = scored_text(self.scope, prompts, embed(prompts.ids), embed(ids), mask)
        return self.differentiable(text, text_mask)

    @property
    def parts(self) -> Sequence[Reward]:
        """The rewards that this is a sum of, or itself alone."""
        return (self,)

    @property
    def learned(self) -> Sequence[Reward]:
        """The parts that training follows; the others only have values in its log and in evaluations."""
        return self.parts

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """The reward [B] from its parts' values [B], differentiable."""
        (value,) = values
        return value


class EmbeddingReward(Reward):
    """A function of embeddings, the policy's or those of a table, such as `grade.rewards.model.RewardModel`."""

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], Tensor],
        scope: RewardScope = "prompt_and_completion",
        name: str | None = None,
        reads: EmbeddingTable | None = None,
    ) -> None:
        self.function, self.scope, self.reads, self.kind = function, scope, reads, getattr(function, "kind", None)
        self.name = name or getattr(function, "name", None) or self.kind or "reward"

    def differentiable(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of embeddings [B, L, D] with mask [B, L]."""
        return self.function(embeds, mask)


def check_values(reward: Reward, values: Tensor, rows: int, gradient: bool = False) -> Tensor:
    """The values of a reward, if there is one for each of so many rows (others would be broadcast), with gradient."""
    if values.shape != (rows,) or (gradient and not values.requires_grad):
        about = f"shape {list(values.shape)}, {'with' if values.requires_grad else 'without'} gradient"
        allowed = f"shape [{rows}], one value for each completion{', with gradient' if gradient else ''}"
        raise InputError(f"reward {reward.name!r}", about, allowed)
    return values


def scored_text(
    scope: RewardScope | None, prompts: PromptBatch, prompt_values: Tensor, values: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The text that a reward of a scope reads, and its mask; values are ids [B, L] or embeddings [B, L, D]."""
    if scope is None:
        raise ValueError("a differentiable reward needs a scope")
    if scope == "completion":
        return values, mask
    return torch.cat([prompt_values, values], 1), torch.cat([prompts.mask, mask], 1)
