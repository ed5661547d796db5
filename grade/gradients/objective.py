"""What all engines share: the objective, the protocol of rewards, the result, and the signature.

A **reward** is one of these, or a weighted sum of them (`RewardSum`):

- a callable of the policy's embeddings and a mask (`EmbeddingReward`): a head on the frozen base;
- the same with an attribute ``reads``, an `EmbeddingTable` of its own: a classifier with the policy's vocabulary.
  Relaxed tokens become ``e_R = scale * sum_k y_k E_R[support_k]``;
- an object with ``score(prompts, ids, mask)`` only (`TextReward`): functions and classifiers of text.

The first two are differentiable, and any method takes them. The third has no gradient: policy gradients only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.embedding import EmbeddingTable, RewardScope
from grade.models.prompts import PromptBatch

if TYPE_CHECKING:
    from grade.gradients.estimators import RelaxationConfig
    from grade.models.backbone import Backbone


class EmbeddingReward(Protocol):
    """A differentiable reward: a function of embeddings.

    With an attribute ``reads`` (an `EmbeddingTable`) they are its own, otherwise the policy's.
    """

    def __call__(self, embeds: Tensor, mask: Tensor, /) -> Tensor:
        """Rewards [B] of embeddings [B, L, D] with mask [B, L]."""


class TextReward(Protocol):
    """A reward of hard completions. ``no_gradient``, if there is such an attribute, says why it has no gradient."""

    name: str

    def score(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T] with mask [B, T], without gradient."""


class RewardSum(TextReward, Protocol):
    """Several rewards with weights."""

    parts: Sequence[EmbeddingReward | TextReward]

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """The weighted sum [B] of the parts' values [B], differentiable."""


Reward = EmbeddingReward | TextReward | RewardSum
OwnEmbeddings = Callable[[EmbeddingTable], Tensor]
"""Completion embeddings [B, T, D_R] in a reward's own table."""


@dataclass(frozen=True)
class Objective:
    """``L = mean_b(-R_b + beta * mean_t KL_bt)``, KL over the completion's valid positions only.

    The reference is a constant: KL's gradient reaches the policy's logits and, through them, earlier tokens, but not
    the reference's own inputs (as in the source documents, which run the reference without gradient).

    Attributes:
        reward_model: The reward, of any kind.
        beta: Weight of KL, in reward per nat and token (the documents' ``kl_coef``).
        scope: Which text is scored; the same for every method. Functions always get prompts and completions.

    Raises:
        ValueError: If the reward was made for another scope.
    """

    reward_model: Reward
    beta: float = 0.1
    scope: RewardScope = "prompt_and_completion"

    def __post_init__(self) -> None:
        made_for = getattr(self.reward_model, "scope", self.scope)
        if made_for != self.scope:
            raise ValueError(f"the reward was made for scope {made_for!r}, the objective has {self.scope!r}")

    @property
    def parts(self) -> Sequence[Reward]:
        """The parts of a sum, or the reward alone."""
        return getattr(self.reward_model, "parts", (self.reward_model,))

    @property
    def tables(self) -> list[EmbeddingTable]:
        """Embedding tables that rewards read instead of the policy's, in the order of the parts."""
        tables = (getattr(part, "reads", None) for part in self.parts)
        return [table for table in tables if table is not None]

    def require_gradient(self, method: str) -> None:
        """Reject a reward without gradient.

        Args:
            method: The relaxed method or estimator that needs it, for the message.

        Raises:
            InputError: Naming the reward, what a differentiable one is, and the methods that take any.
        """
        from grade.gradients.methods import POLICY_GRADIENTS  # here: it imports much that rewards do not need

        for part in self.parts:
            if not callable(part):
                raise InputError(
                    f"reward {getattr(part, 'name', type(part).__name__)!r}",
                    getattr(part, "no_gradient", "a reward of text, which has no gradient"),
                    f"for {method} a differentiable reward: a reward model on the policy's embeddings, or a classifier "
                    f"with the policy's vocabulary ({', '.join(POLICY_GRADIENTS)} take any reward)",
                )

    def reward(
        self,
        prompt_embeds: Tensor,
        prompts: PromptBatch,
        embeds: Tensor,
        mask: Tensor,
        own: OwnEmbeddings | None = None,
    ) -> Tensor:
        """Reward [B] of relaxed completions, differentiable in their embeddings.

        Args:
            prompt_embeds: The prompts in the policy's table [B, P, D].
            prompts: B prompts.
            embeds: The completions in the policy's table [B, T, D].
            mask: [B, T].
            own: Gives the completions in another table; only called for parts that read one, once for each.
        """
        values = []
        for part in self.parts:
            table = getattr(part, "reads", None)
            if table is None:
                values.append(self._read(part, prompt_embeds, prompts, embeds, mask))
            else:
                values.append(self._read(part, table.embed(prompts.ids), prompts, own(table), mask))
        return self.reward_model.combine(values) if hasattr(self.reward_model, "combine") else values[0]

    def score(self, backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Reward [B] of hard completions [B, T], on exactly the text that training scores."""
        if hasattr(self.reward_model, "score"):
            return self.reward_model.score(prompts, ids, mask)
        embeds = backbone.embed(ids)
        if self.scope == "completion":
            return self.reward_model(embeds, mask)
        return self.reward(backbone.embed(prompts.ids), prompts, embeds, mask)

    def _read(
        self, part: EmbeddingReward, prompt_embeds: Tensor, prompts: PromptBatch, embeds: Tensor, mask: Tensor
    ) -> Tensor:
        if self.scope == "prompt_and_completion":
            embeds, mask = torch.cat([prompt_embeds, embeds], 1), torch.cat([prompts.mask, mask], 1)
        return part(embeds, mask)


@dataclass(frozen=True)
class GradientStep:
    """Result of one call of an engine; the gradient itself is in ``.grad`` of the adapter's parameters.

    Attributes:
        completion_ids: Hard tokens [B, T].
        completion_mask: Valid positions [B, T].
        reward: Rewards [B].
        kl: KL at each position [B, T] in nats, 0 where masked.
        loss: The loss, a scalar.
        residual: Relative size of the last correction to the adjoint, ``|a_n - a_{n-1}| / |a_n|``; None if there was
            no correction (hops = 0, or an exact engine).
        hops: Feedback hops used; None for an exact engine.
    """

    completion_ids: Tensor
    completion_mask: Tensor
    reward: Tensor
    kl: Tensor
    loss: Tensor
    residual: Tensor | None = None
    hops: int | None = None


class Engine(Protocol):
    """Adds ``scale * dL/dtheta`` to ``.grad`` of the adapter's parameters."""

    def __call__(
        self,
        backbone: Backbone,
        prompts: PromptBatch,
        objective: Objective,
        relaxation: RelaxationConfig,
        generator: torch.Generator,
        scale: float = 1.0,
    ) -> GradientStep:
        """Sample completions of ``prompts`` and accumulate the gradient, times ``scale``."""
        ...


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each sequence's valid positions.

    Args:
        values: [B, T].
        mask: [B, T], at least one valid position per row.

    Returns:
        [B]. Sequences of different length have equal weight, so the gradients of microbatches add up to the gradient
        of the whole batch.
    """
    mask = mask.to(values.dtype)
    return (values * mask).sum(-1) / mask.sum(-1)


def check_finite(reward: Tensor, loss: Tensor) -> None:
    """Reject NaN and infinity before they reach a gradient.

    Raises:
        InputError: Naming reward or loss.
    """
    for name, value in (("reward", reward), ("loss", loss)):
        if not torch.isfinite(value).all():
            raise InputError(name, value.detach().flatten().tolist()[:8], "finite numbers; nothing was updated")
