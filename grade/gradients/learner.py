"""What the methods share: completions of a step, and a learner that samples them, has them scored, and updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grade.gradients.methods import MethodConfig
from grade.gradients.objective import GradientStep, Objective, check_finite, sequence_mean
from grade.models.backbone import Backbone
from grade.models.batch import Completions, PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import kl_and_entropy, predicting_hidden

OWN_RATE = 1e-3
"""AdamW learning rate of what a method trains beside the adapter, such as a value head."""
Microbatch = tuple[PromptBatch, torch.Generator] | Completions


def prompts_of(microbatch: Microbatch) -> PromptBatch:
    """The prompt of each completion of a microbatch."""
    return microbatch.prompts if isinstance(microbatch, Completions) else microbatch[0]


@dataclass(frozen=True)
class StepContext:
    """What a learner needs from the training loop."""

    microbatches: int  # microbatches per step, over all processes
    apply: Callable[[], object]  # takes an optimizer step with the current gradients
    total: Callable[[Tensor], Tensor] = lambda x: x  # sums a tensor over processes
    gather: Callable[[list[Any]], list[Any]] = lambda x: x  # joins lists of all processes, in order of rank
    step: int = 0  # optimizer steps before this one


class Learner:
    """A method that samples completions of a step, has them scored, and updates: what all of these share."""

    def __init__(self, config: MethodConfig, backbone: Backbone) -> None:
        self.config, self.backbone = config, backbone
        self.means: list[float] = []  # mean return of each earlier step, if the method reads them
        self.figures: dict[str, list[Tensor]] = {}  # of the last step, by name
        self.direction: Tensor | None = None  # of the token bias [V], where the last step sets that

    def parameters(self) -> list[nn.Parameter]:
        """Trained parameters other than the adapter's."""
        return []

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, beside `means`."""
        return {}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """Sample completions, or take those that are given, and add their gradient; one result per microbatch.

        Microbatches are this process's: a prompt for each completion, with the generator for them; or completions. The
        G completions of a prompt are consecutive, within a microbatch or over several.
        """
        self.figures = {}
        steps = [self.accumulate(each, objective, 1 / context.microbatches) for each in self.sampled(microbatches)]
        context.apply()
        return steps

    @torch.no_grad()
    def accumulate(self, completions: Completions, objective: Objective, scale: float = 1.0) -> GradientStep:
        """Score completions. A method adds ``scale`` times the gradient of the loss along them."""
        prompts, ids, mask = completions.text
        reward = self.rewards_of(prompts, ids, mask, objective)
        kl, entropy = kl_and_entropy(self.backbone, self.hidden(prompts, ids), self.reference(prompts, ids), mask)
        loss = -(reward - objective.beta * sequence_mean(kl, mask)).nanmean().nan_to_num(0.0)
        return GradientStep(ids, mask, reward, kl, loss, scores=objective.reward_model.last, entropy=entropy)

    def sample(self, prompts: PromptBatch, generator: torch.Generator, temperature: float = 1.0) -> Completions:
        """A completion of each prompt."""
        most, least = self.config.max_completion_length, self.config.min_completion_length
        return Completions(prompts, *generate(self.backbone, prompts, most, generator, temperature, least))

    def sampled(self, microbatches: Iterable[Microbatch]) -> Iterator[Completions]:
        """Each microbatch's completions: sampled now, unless they are given."""
        found = (one if isinstance(one, Completions) else self.sample(*one) for one in microbatches)
        # Recomputed layers have no cache. Then no pass has one: policy and reference are equal to the bit while B is 0.
        return (replace(c, prompts=replace(c.prompts)) if self.config.gradient_checkpointing else c for c in found)

    def hidden(self, prompts: PromptBatch, ids: Tensor) -> Tensor:
        """The policy's hidden states [B, T, D] that predict completions [B, T]."""
        with self.backbone.checkpointed_layers(bool(self.config.gradient_checkpointing) and torch.is_grad_enabled()):
            return predicting_hidden(self.backbone, prompts, ids)

    @torch.no_grad()
    def reference(self, prompts: PromptBatch, ids: Tensor) -> Tensor:
        """The same of the frozen base, without gradient."""
        with self.backbone.reference():
            return predicting_hidden(self.backbone, prompts, ids)

    @torch.no_grad()
    def rewards_of(self, prompts: PromptBatch, ids: Tensor, mask: Tensor, objective: Objective) -> Tensor:
        """Rewards [B] of completions, which must be finite; NaN where every function that is learned returned None."""
        reward = objective.score(self.backbone, prompts, ids, mask)
        scores, none = objective.reward_model.last, torch.zeros_like(reward, dtype=torch.bool)
        if scores is not None:
            none = reward.isnan() | torch.stack(list(scores.values.values())).isnan().all(0)
        given = reward.masked_fill(none, 0.0)
        check_finite(given, given)
        return given.masked_fill(none, torch.nan)

    def _note(self, figures: Mapping[str, Tensor | float]) -> None:
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(torch.as_tensor(value))
