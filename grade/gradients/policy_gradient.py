"""Policy gradients on the shared base: `reinforce`, `rloo`, `remax`, `grpo` and `ppo`.

Completions are sampled on the key-value cache and scored by the same reward model, on the same text, as with the
relaxed methods. One pass over the sampled tokens then gives log-probabilities and KL in row chunks, so no [B, T, V]
tensor exists. All methods ascend the objective of the relaxed ones (`grade.gradients.objective`),
``E[R - beta * mean_t KL_t]``. Its gradient has two terms: the score function weighted by the *penalised* return,
because KL depends on which tokens were sampled, and KL's own gradient at the sampled positions. Both are included, so
`reinforce`, `rloo`, `remax` and `grpo` with its default options are unbiased.

| method | advantage of completion y |
|---|---|
| reinforce | penalised return minus an average of earlier steps' returns |
| rloo | minus the mean of the prompt's other completions |
| remax | minus the greedy completion's, also penalised |
| grpo | as rloo, optionally divided by the group's standard deviation; ratio clipped if a step has several updates |
| ppo | token by token: generalised advantage estimation over time with a learned value, whitened over the step |

A step with one update needs one pass with gradient; with several updates, completions are first scored without
gradient. The value head reads the policy's hidden states but sends no gradient into them.

Left out: entropy bonuses, shuffling between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grade.gradients import losses
from grade.gradients.learner import Learner, Microbatch, StepContext, prompts_of
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import GradientStep, Objective, check_finite, relative, sequence_mean
from grade.gradients.settings import GRPOSettings
from grade.models.backbone import Backbone
from grade.models.batch import Completions, PromptBatch
from grade.models.head import wide
from grade.models.scoring import hidden_scores


@dataclass(frozen=True)
class _Kind:
    """A policy gradient."""

    grouped: bool = False  # whether the baseline is the mean of the prompt's other completions
    clipped: bool = False  # whether the loss is the clipped surrogate, which several updates per step need
    value_head: bool = False  # whether it learns a value function, from which advantages follow token by token
    greedy: bool = False  # whether it samples a greedy completion of each prompt as well
    running_mean: bool = False  # whether the baseline is an average of earlier steps' returns


POLICY_GRADIENT_METHODS: dict[str, _Kind] = {
    "reinforce": _Kind(running_mean=True),
    "rloo": _Kind(grouped=True),
    "remax": _Kind(greedy=True),
    "grpo": _Kind(grouped=True, clipped=True),
    "ppo": _Kind(clipped=True, value_head=True),
}


@dataclass(frozen=True)
class _Experience:
    """Completions with everything that an update treats as constant."""

    completions: Completions
    reference: Tensor  # hidden states of the reference [B, T, D]
    logps: Tensor  # log-probabilities under the policy that sampled [B, T]
    kl: Tensor  # KL under that policy [B, T]
    entropy: Tensor  # its entropy [B, T]
    reward: Tensor  # [B], NaN where no function scored
    scores: Any  # what each reward gave
    returns: Tensor  # penalised returns [B]
    advantages: Tensor  # [B, T], or [B, 1] if all tokens share one
    values: Tensor | None = None  # with a value head: V of the state before each token [B, T]
    targets: Tensor | None = None  # with a value head: its targets [B, T]
    # Factor on KL's own gradient: 1, or the whitening factor, so that whitening keeps the balance of reward and KL.
    kl_factor: float = 1.0

    @property
    def scored(self) -> Tensor:
        """The mask [B, T] of completions that have a reward."""
        return self.completions.mask * self.reward.isfinite().unsqueeze(1)


class _ValueHead(nn.Module):
    """``V(h) = w . layer_norm(h) + b``, initially 0. Normalised, as a few entries of hidden states are very large."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.linear = nn.Linear(backbone.hidden_size, 1, dtype=wide(backbone.dtype), device=backbone.device)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """V [B, T] of hidden states [B, T, D], which get no gradient."""
        hidden = hidden.detach().to(self.linear.weight.dtype)
        return self.linear(F.layer_norm(hidden, hidden.shape[-1:])).squeeze(-1)


class PolicyGradient(Learner):
    """One of the methods, with its state between steps: a running baseline or a value head."""

    def __init__(self, config: MethodConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        self.method = POLICY_GRADIENT_METHODS[config.method]
        grpo = isinstance(config, GRPOSettings)
        self.normalize_std = grpo and config.scale_rewards == "group"
        self.value_head = _ValueHead(backbone) if self.method.value_head else None

    def parameters(self) -> list[nn.Parameter]:  # noqa: D102
        return [] if self.value_head is None else list(self.value_head.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """The value head's."""
        return {} if self.value_head is None else self.value_head.state_dict()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""
        if self.value_head is not None:
            self.value_head.load_state_dict(tensors)

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """As `Learner.step`, with all of the method's updates; results are under the policy that sampled."""
        microbatches = list(microbatches)
        often = self.config.updates > 1 or self.method.value_head or self._spread(microbatches) > 1
        steps = (self._update_often if often else super().step)(microbatches, objective, context)
        if self.method.running_mean:
            means = torch.stack([-step.loss for step in steps]).sum() * (1 / context.microbatches)
            self.means.append(float(context.total(means)))
        return steps

    def accumulate(self, completions: Completions, objective: Objective, scale: float = 1.0) -> GradientStep:
        """Add ``scale`` times the gradient of the loss (the negative objective) in one pass; not for ppo.

        The completions are samples of the current policy.
        """
        # Scored before the pass with gradient, so that a large reward model does not come on top of its graph.
        reward = self.rewards_of(*completions.text, objective)
        terms = self._terms(completions, None, objective.beta)
        (seen,) = self._compared([self._experience(completions, objective, terms, reward)], objective)
        (self._loss(terms, seen, objective) * scale).backward(inputs=self.backbone.trainable_parameters())
        return _result(seen)

    def _spread(self, microbatches: Sequence[Microbatch]) -> int:
        """Over how many microbatches the completions of a prompt are spread, where they have a baseline in common."""
        shared = self.method.grouped or self.method.greedy
        return max(1, self.config.group // len(prompts_of(microbatches[0]))) if shared else 1

    def _update_often(
        self, microbatches: Sequence[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        self.figures, experience = {}, []
        for completions in self.sampled(microbatches):
            with torch.no_grad():
                experience.append(self._experience(completions, objective, self._terms(completions, None)))
        if self.value_head is None:
            number = self._spread(microbatches)
            parts = [experience[start : start + number] for start in range(0, len(experience), number)]
            experience = [seen for part in parts for seen in self._compared(part, objective)]
        else:
            experience = self._whitened(experience, objective, context)
        inputs = [*self.backbone.trainable_parameters(), *self.parameters()]
        for _ in range(self.config.updates):
            for p in inputs:
                p.grad = None
            for seen in experience:
                loss = self._loss(self._terms(seen.completions, seen.reference, objective.beta), seen, objective)
                (loss * (1 / context.microbatches)).backward(inputs=inputs)
            context.apply()
        return [_result(seen) for seen in experience]

    def _whitened(self, experience: list[_Experience], objective: Objective, context: StepContext) -> list[_Experience]:
        def over(values: Callable[[_Experience], Tensor], mask: Callable[[_Experience], Tensor]) -> Tensor:
            return context.total(torch.stack([losses.moments(values(e), mask(e)) for e in experience]).sum(0))

        rewards = over(lambda e: e.reward.nan_to_num(0.0).unsqueeze(1), lambda e: e.scored[:, :1])
        if rewards[0] != 1 and losses.equal(rewards, experience[0].reward.dtype):
            # No completion is better than another: what remains is KL.
            return [replace(e, advantages=self._gae(e.reward * 0, e.kl, 0 * e.values, e.scored, objective)[0])
                    for e in experience]  # fmt: skip
        advantages, whitened = over(lambda e: e.advantages, lambda e: e.scored), []
        for seen in experience:
            values, factor = losses.whiten(seen.advantages, seen.scored, advantages)
            whitened.append(replace(seen, advantages=values, kl_factor=factor))
        return whitened

    def _gae(
        self, reward: Tensor, kl: Tensor, values: Tensor, scored: Tensor, objective: Objective
    ) -> tuple[Tensor, Tensor]:
        """Advantages and targets [B, T]: 0 and the value itself where a completion was not scored."""
        rewards = losses.token_rewards(reward.nan_to_num(0.0), kl, scored, objective.beta).nan_to_num(0.0)
        advantages, targets = losses.gae(rewards, values, scored)
        return advantages, torch.where(scored.bool(), targets, values)

    def _terms(self, completions: Completions, reference: Tensor | None, beta: float = 0.0) -> tuple[Tensor, ...]:
        """Log-probabilities and KL [B, T], hidden states of policy and reference [B, T, D], the entropy [B, T].

        KL has a gradient only if it has a weight: that costs a product with the head.
        """
        prompts, ids, mask = completions.text
        if reference is None:
            reference = self.reference(prompts, ids)
        hidden = self.hidden(prompts, ids)
        # Under the distribution that was sampled from: no end-of-sequence before min_completion_length.
        least = self.config.min_completion_length
        logps, kl, entropy = hidden_scores(self.backbone, hidden, reference, ids, mask, least, kl_gradient=beta > 0)
        return logps, kl, hidden, reference, entropy

    @torch.no_grad()
    def _experience(
        self, completions: Completions, objective: Objective, terms: tuple[Tensor, ...], reward: Tensor | None = None
    ) -> _Experience:
        """What an update treats as constant; ``terms`` are those of `_terms`, under the policy that sampled.

        Advantages of whole completions are still to come, see `_compared`.
        """
        logps, kl, hidden, reference, entropy = terms
        logps, kl, mask = logps.detach(), kl.detach(), completions.mask
        if reward is None:
            reward = self.rewards_of(*completions.text, objective)
        returns = _penalised(reward, kl, mask, objective.beta)
        check_finite(reward.nan_to_num(0.0), returns.nan_to_num(0.0))
        scores = objective.reward_model.last
        seen = _Experience(completions, reference, logps, kl, entropy, reward, scores, returns, returns)
        if self.value_head is None:
            return seen
        values = self.value_head(hidden)
        advantages, targets = self._gae(reward, kl, values, seen.scored, objective)
        return replace(seen, advantages=advantages, values=values, targets=targets)

    @torch.no_grad()
    def _compared(self, parts: Sequence[_Experience], objective: Objective) -> list[_Experience]:
        """With advantages of whole completions [B, 1]; ``parts`` are microbatches that have whole groups together."""
        group = self.config.group
        if self.method.grouped:  # rewards are compared before KL, which is smaller
            rewards = relative(torch.cat([part.reward for part in parts]).view(-1, group)).flatten()
            sizes = [len(part.reward) for part in parts]
            returns = [
                _penalised(reward, part.kl, part.completions.mask, objective.beta)
                for reward, part in zip(rewards.split(sizes), parts, strict=True)
            ]
            advantages = losses.grpo(torch.cat(returns).view(-1, group), self.normalize_std).flatten().split(sizes)
        elif self.method.running_mean:
            baseline = losses.ema_baseline(self.means)
            advantages = [losses.above(part.returns, baseline, part.reward.dtype) for part in parts]
        else:
            group = min(group, len(parts[0].returns))
            baseline, dtype = self._greedy_returns(parts[0].completions.prompts[::group], objective)
            advantages = [losses.above(part.returns.view(-1, group), baseline, dtype).flatten() for part in parts]
        return [
            replace(part, advantages=values.nan_to_num(0.0).unsqueeze(1))
            for part, values in zip(parts, advantages, strict=True)
        ]

    def _greedy_returns(self, prompts: PromptBatch, objective: Objective) -> tuple[Tensor, torch.dtype]:
        """Penalised returns [N, 1] of the greedy completion of each prompt, and the type of its reward."""
        greedy = self.sample(prompts, torch.Generator(self.backbone.device), 0.0)
        _, kl, *_ = self._terms(greedy, None)
        reward = self.rewards_of(*greedy.text, objective)
        return _penalised(reward, kl, greedy.mask, objective.beta).unsqueeze(1), reward.dtype

    def _loss(self, terms: tuple[Tensor, ...], seen: _Experience, objective: Objective) -> Tensor:
        """Of an update, with a trained value head's; ``terms`` are those of `_terms`, with gradient."""
        logps, kl, hidden, *_ = terms
        mask = seen.completions.mask
        taught = objective.taught(hidden, *seen.completions.text)
        if self.method.clipped:
            epsilon = self.config.epsilon
            weighted = losses.clipped_surrogate(logps, seen.logps, seen.advantages, epsilon)
            self._note({"clip_fraction": losses.clip_fraction(logps.detach(), seen.logps, mask, epsilon)})
        else:
            weighted = seen.advantages * logps
        penalty = objective.beta * seen.kl_factor * sequence_mean(kl, mask).mean()
        if taught is not None:
            penalty = penalty + seen.kl_factor * sequence_mean(taught, mask).mean()
        loss = -(weighted * mask).sum(-1).mean() + penalty
        if self.value_head is None:
            return loss
        value_loss = sequence_mean((self.value_head(hidden) - seen.targets) ** 2 / 2, mask).mean()
        self._note({"value_loss": value_loss.detach()})
        return loss + value_loss


def _result(seen: _Experience) -> GradientStep:
    loss = -seen.returns.nanmean().nan_to_num(0.0)
    ids, mask = seen.completions.ids, seen.completions.mask
    return GradientStep(ids, mask, seen.reward, seen.kl, loss, scores=seen.scores, entropy=seen.entropy)


def _penalised(reward: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """``R - beta * mean_t KL_t`` [B]."""
    return reward - beta * sequence_mean(kl, mask)
