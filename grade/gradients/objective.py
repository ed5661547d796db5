"""What all engines share: the objective, the result of a step, and an engine's signature."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from grade.config import allowed_names
from grade.errors import InputError
from grade.models.batch import PromptBatch
from grade.models.head import EmbeddingTable
from grade.models.policy import Policy
from grade.rewards.base import EmbeddingReward, Reward, RewardScope, check_values, scored_text

ANY_REWARD = "reinforce, rloo, remax, grpo, ppo"
"""Methods that take any reward, for an error's text."""
ROUNDING = 4
"""Values that differ by at most this many units of rounding are equal: no completion is better than another."""


@dataclass(frozen=True)
class Objective:
    """``L = mean_b(-R_b + beta * mean_t KL_bt)``, KL over the completion's valid positions only.

    Further terms ``-mean_t D_bt`` that depend on the policy's distributions are parts of R too. As with KL, their
    gradient has two parts: which tokens are sampled, through R, and D's own at each position (`taught`).

    The reference is a constant: KL's gradient reaches the policy's logits and, through them, earlier tokens, but not
    the reference's own inputs (as in the source documents, which run the reference without gradient).

    Attributes:
        reward_model: A `Reward`, or a function of the policy's embeddings [B, L, D] and mask [B, L], such as a
            `grade.rewards.model.RewardModel`.
        beta: Weight of KL, in reward per nat and token (the documents' ``kl_coef``).
        scope: Which text is scored; the same for every method. Functions of text always get prompts and completions.
        terms: Further terms: from hidden states [B, T, D], prompts, completions and mask [B, T] to D [B, T].

    Raises:
        ValueError: If the reward was made for another scope.
    """

    reward_model: Reward | Callable[[Tensor, Tensor], Tensor]
    beta: float = 0.1
    scope: RewardScope = "prompt_and_completion"
    terms: Sequence[Callable[..., Tensor]] = ()

    def __post_init__(self) -> None:
        reward = self.reward_model
        if not 0 <= self.beta < math.inf:
            raise InputError("beta", self.beta, "a number of at least 0")
        if self.scope not in get_args(RewardScope):
            raise InputError("scope", self.scope, allowed_names(self.scope, get_args(RewardScope)))
        if not isinstance(reward, Reward):
            reward = EmbeddingReward(reward, self.scope)
            object.__setattr__(self, "reward_model", reward)
        if reward.scope not in (None, self.scope):
            raise ValueError(f"the reward was made for scope {reward.scope!r}, the objective has {self.scope!r}")

    def require_gradient(self, method: str) -> None:
        """Reject a reward without gradient for a relaxed method or estimator.

        Raises:
            InputError: Naming the reward, what a differentiable one is, and the methods that take any.
        """
        for part in self.reward_model.learned:
            if part.differentiable is None:
                raise InputError(
                    f"reward {part.name!r}",
                    part.no_gradient,
                    f"for {method} a differentiable reward: a reward model on the policy's embeddings, or a classifier "
                    f"with the policy's vocabulary ({ANY_REWARD} take any reward)",
                )

    def reward(
        self, prompt_embeds: Tensor, prompts: PromptBatch, embeds: Tensor, mask: Tensor,
        own: Callable[[EmbeddingTable], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Reward [B] of relaxed completions, differentiable in their embeddings.

        Args:
            prompt_embeds: The prompts in the policy's table [B, P, D].
            prompts: B prompts.
            embeds: The completions in the policy's table [B, T, D].
            mask: [B, T].
            own: Gives the completions in another table; only called for parts that read one, once for each.

        Returns:
            [B].
        """
        values, learned = [], self.reward_model.learned
        for part in self.reward_model.parts:
            if part not in learned:
                values.append(None)
                continue
            pair = (prompt_embeds, embeds) if part.reads is None else (part.reads.embed(prompts.ids), own(part.reads))
            value = part.differentiable(*scored_text(part.scope, prompts, *pair, mask))
            values.append(check_values(part, value, len(mask), gradient=embeds.requires_grad))
        return self.reward_model.combine(values)

    def score(self, backbone: Policy, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Reward [B] of hard completions [B, T], on exactly the text that training scores."""
        return self.reward_model.score(backbone, prompts, ids, mask)

    def taught(self, hidden: Tensor, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor | None:
        """The sum of all further terms D_bt [B, T], differentiable in hidden states [B, T, D]; None without any."""
        values = [term(hidden, prompts, ids, mask) for term in self.terms]
        return sum(values[1:], values[0]) if values else None


@dataclass(frozen=True)
class GradientStep:
    """Result of one call of an engine; the gradient itself is in ``.grad`` of the adapter's parameters."""

    completion_ids: Tensor  # hard tokens [B, T]
    completion_mask: Tensor  # valid positions [B, T]
    reward: Tensor  # rewards [B], NaN where no function scored
    kl: Tensor  # KL at each position [B, T] in nats, 0 where masked
    loss: Tensor  # the loss, a scalar
    # relative size of the last correction to the adjoint, ``|a_n - a_{n-1}| / |a_n|``; None if there was no correction
    # (hops = 0, or an exact engine)
    residual: Tensor | None = None
    scores: Any = None  # what each reward gave (`grade.rewards.rewards.Scores`)
    entropy: Tensor | None = None  # of the policy that sampled, at each position [B, T] in nats, 0 where masked


Engine = Callable[..., GradientStep]
"""``(backbone, prompts, objective, relaxation, generator, scale=1.0)``: samples completions of the prompts and adds
``scale * dL/dtheta`` to ``.grad`` of the adapter's parameters."""


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean [B] over each sequence's valid positions, of values and mask [B, T] with at least one position per row.

    Sequences of different length have equal weight, so the gradients of microbatches add up to that of the batch.
    """
    mask = mask.to(values.dtype)
    return (values * mask).sum(-1) / mask.sum(-1)


def relative(values: Tensor) -> Tensor:
    """Values [N, G] minus their group's mean, exactly 0 where a group differs by rounding alone; NaN stays, uncounted.

    >>> relative(torch.tensor([[1.0, 3.0, torch.nan], [1.0, 1.0000001, 1.0]]))
    tensor([[-1.,  1., nan],
            [ 0.,  0.,  0.]])
    """
    most, least = values.nan_to_num(-torch.inf).amax(1), values.nan_to_num(torch.inf).amin(1)
    largest = values.abs().nan_to_num(0.0).amax(1)
    differ = most - least > ROUNDING * torch.finfo(values.dtype).eps * largest
    return (values - values.nanmean(1, keepdim=True)) * differ.unsqueeze(1)


def check_finite(reward: Tensor, loss: Tensor) -> None:
    """Reject NaN and infinity before they reach a gradient."""
    for name, value in (("reward", reward), ("loss", loss)):
        if not torch.isfinite(value).all():
            raise InputError(name, value.detach().flatten().tolist()[:8], "finite numbers; nothing was updated")
