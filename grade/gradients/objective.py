"""What all engines share: the objective, the result, and the signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.prompts import PromptBatch

if TYPE_CHECKING:
    from grade.gradients.estimators import RelaxationConfig
    from grade.models.backbone import Backbone

RewardScope = Literal["prompt_and_completion", "completion"]


class Reward(Protocol):
    """A differentiable reward: a function of embeddings."""

    def __call__(self, embeds: Tensor, mask: Tensor, /) -> Tensor:
        """Rewards [B] of embeddings [B, L, D] with mask [B, L]."""


@dataclass(frozen=True)
class Objective:
    """``L = mean_b(-R_b + beta * mean_t KL_bt)``, KL over the completion's valid positions only.

    The reference is a constant: KL's gradient reaches the policy's logits and, through them, earlier tokens, but not
    the reference's own inputs (as in the source documents, which run the reference without gradient).

    Attributes:
        reward_model: Maps embeddings [B, L, D] and mask [B, L] to rewards [B].
        beta: Weight of KL, in reward per nat and token (the documents' ``kl_coef``).
        scope: Which text is scored; the same for every method.
    """

    reward_model: Reward
    beta: float = 0.1
    scope: RewardScope = "prompt_and_completion"

    def reward(self, prompt_embeds: Tensor, prompts: PromptBatch, embeds: Tensor, mask: Tensor) -> Tensor:
        """Reward [B] of completion embeddings [B, T, D] with mask [B, T]."""
        if self.scope == "prompt_and_completion":
            embeds, mask = torch.cat([prompt_embeds, embeds], 1), torch.cat([prompts.mask, mask], 1)
        return self.reward_model(embeds, mask)

    def score(self, backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Reward [B] of hard completions [B, T], on exactly the text that training scores."""
        embeds = backbone.embed(ids)
        if self.scope == "completion":
            return self.reward_model(embeds, mask)
        return self.reward(backbone.embed(prompts.ids), prompts, embeds, mask)


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
