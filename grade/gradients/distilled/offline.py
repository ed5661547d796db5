"""Training along scored text: reward gradients without a sample of the policy.

With the values ``s_t(v)`` of a reward that was distilled from texts (`grade.gradients.distilled.prior`), a step
ascends, along these texts themselves,

    g = sum_t grad [ sum_v pi(v | y_<t) s_t(v) - beta / T KL(pi || reference)(y_<t) ].

Both terms are exact over the vocabulary, in one parallel pass. Reward calls and sampling stay outside the loop.
These are the all-action gradients of mean actor-critic (Allen et al. 2017, arXiv:1709.00503) and expected policy
gradients (Ciosek and Whiteson 2018, arXiv:1706.05374), along text that nobody sampled, with a critic in closed form.

Two things are not known from texts: how far the policy is from the reference on *its own* text, where what it likes
reinforces itself, and whether the reward rises there. A few own completions say both (`Steering`). With ``target_kl``
they also set beta:

- Beta starts where the distilled reward promises the target (`prior.Promise`), and follows ``log beta += GAIN * e``, e
  being the error of the distance ``sqrt(KL)`` as it will be `AHEAD` steps later. KL along a batch of texts has little
  noise, so it can be followed in every step; it is multiplied by the ratio of own to texts' KL that was measured last.
- An update that would carry KL beyond the target is shortened to land on it. Where beta is too small for the target,
  the policy otherwise runs away between two measurements.
- After the last step the adapter is scaled so that its own completions have the target's KL.

Where rewards of own completions do not rise with the prediction, the texts are too far from what the policy writes, and
the run ends with an error.

A run of `distilled` with texts begins in this way and goes on with own completions; it starts over without texts where
this run would end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.gradients.distilled.families import Family, make_family
from grade.gradients.distilled.prior import Promise, fit_texts, promise
from grade.gradients.distilled.ridge import centred
from grade.gradients.distilled.store import Evidence, Fit
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import GradientStep, Objective, sequence_mean
from grade.gradients.policy_gradient import Completions, Learner
from grade.models.backbone import Backbone
from grade.models.prompts import ScoredTexts
from grade.models.scoring import token_kl

GAIN = 0.1
"""Change of log beta in a step at an error of 1, the largest that counts."""
AHEAD = 5
"""Steps that the error of beta looks ahead."""
SLOPE_OVER = 3
"""Steps over which the growth of the distance is taken."""
LEAST_RATIO = 0.5
"""Of own completions' KL to that along the texts: a few short ones may miss the rare prefixes where KL is large."""
PREFIXES = 64
"""Texts whose prefixes the promise is made along."""
FEWEST = 24
"""Own completions that can disprove what texts predict."""


def own_completions(step: int, steps: int, most: int) -> int:
    """How many own completions are drawn after a step: an eighth of most at each quarter, the rest after the last.

    >>> [own_completions(step, 8, 64) for step in range(1, 9)]
    [0, 8, 0, 8, 0, 8, 0, 40]
    """
    if step == steps:
        return most - 3 * (most // 8)
    return most // 8 if step in {steps // 4, steps // 2, 3 * steps // 4} else 0


class Steering:
    """Beta, so that KL of the policy's own completions comes to a target; see the module."""

    def __init__(self, target: float | None, beta: float) -> None:
        self.target, self.beta = target, beta  # KL in nats per completion, None: beta is fixed; its current weight
        self.ratio = 1.0  # own completions' KL over that along the texts, as measured last
        self.recent: list[float] = []  # distances of the last steps, oldest first
        self.evidence = Evidence()  # whether rewards of own completions rise with their prediction
        self.samples = 0  # own completions so far

    def follow(self, kl: float, steps_left: int) -> float:
        """Beta of the next step, after one with this KL along the texts."""
        if self.target is None:
            return self.beta
        distance = math.sqrt(max(kl, 0.0) * self.ratio)
        self.recent = [*self.recent, distance][-1 - SLOPE_OVER :]
        slope = (distance - self.recent[0]) / max(1, len(self.recent) - 1)
        error = (distance + min(AHEAD, steps_left) * slope) / math.sqrt(self.target) - 1
        self.beta *= math.exp(GAIN * min(max(error, -1.0), 1.0))
        return self.beta

    def measure(self, own_kl: float, kl: float, predicted: Tensor, rewards: Tensor) -> None:
        """Take in own completions: their KL and that along the texts, predictions [n] and rewards [n], NaN for none."""
        self.samples += len(rewards)
        self.ratio = max(own_kl / kl, LEAST_RATIO) if min(own_kl, kl) > 0 else self.ratio
        scored = rewards.isfinite()
        if scored.any():
            pair = (each[scored].double().cpu() for each in (predicted, rewards))
            self.evidence.add(*(centred(each, len(each)) for each in pair), 1)

    @property
    def disproved(self) -> bool:
        """Whether the rewards of own completions do not rise with their prediction."""
        return self.samples >= FEWEST and not self.evidence.trust > 0

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for a checkpoint."""
        numbers = torch.tensor([self.beta, self.ratio, self.samples, *self.recent], dtype=torch.float64)
        groups = {f"own/{number}": values for number, values in enumerate(self.evidence.groups)}
        return {"steering": numbers} | groups

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        self.beta, self.ratio, samples, *self.recent = state["steering"].tolist()
        self.samples = int(samples)
        self.evidence.groups = [state[name] for name in sorted(state) if name.startswith("own/")]


class TextSettings(Config):
    """Settings of methods that train along scored texts."""

    most_texts: Annotated[int, Field(ge=8)] = Field(
        8192, description="texts at most that the reward is distilled from: the first rows, or windows of whole texts"
    )
    own_completions: Annotated[int, Field(ge=16)] = Field(
        64,
        description="completions of the policy that measure KL and reward: an eighth at each quarter of the steps "
        "along texts, the rest after the last of them",
    )
    distil_families: Annotated[list[str], Field(min_length=1)] = Field(
        ["counts", "bag"], description="what the reward may be linear in, the best of which is taken: counts, bag"
    )


class OfflineGradient(Learner):
    """The method. `read` comes before the first step."""

    texts: ScoredTexts | None = None  # what it trains on
    prior: Fit | None = None  # the distilled reward
    promised: Promise  # along the texts
    steering: Steering

    def __init__(self, config: MethodConfig, backbone: Backbone, families: Mapping[str, Family] | None = None) -> None:
        super().__init__(config, backbone)
        self.families = families or {name: make_family(name, backbone) for name in config.distil_families}

    @property
    def family(self) -> Family:
        """That of the distilled reward."""
        return self.families[self.prior.family]

    def read(self, texts: ScoredTexts) -> None:
        """Distil the reward of scored texts."""
        prior = fit_texts(self.families, texts)
        if not prior.choice.significant:
            value = f"{len(texts)} that explain {prior.choice.r2:.3f} of the reward on other prompts"
            raise InputError("texts", value, "more, or others: no family of distil_families predicts the reward")
        self.prior = prior

    def begin(self, texts: ScoredTexts, prior: Fit, target: float | None, beta: float) -> None:
        """Train along these texts with this distilled reward; ``beta`` is fixed without a target."""
        self.texts, self.prior = texts, prior
        self.promised = promise(self.family, self.prior.all, texts[:PREFIXES])
        self.steering = Steering(target, beta if target is None else self.promised.at(target)[1])

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint; the fit is made again from the texts."""
        return self.steering.state()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""
        self.steering.restore(tensors)

    def accumulate(self, texts: Completions, objective: Objective, scale: float = 1.0) -> GradientStep:
        """Add the gradient along texts; the result has no rewards."""
        prompts, ids, mask = texts.text
        reference, hidden = self.reference(prompts, ids), self.hidden(prompts, ids)
        expected = self.family.expected(self.prior.all, ids, mask, hidden, self.config.min_completion_length)
        kl = token_kl(self.backbone, hidden, reference, mask)
        penalty = objective.beta * sequence_mean(kl, mask).mean()
        loss = penalty - expected.sum(1).mean()
        (loss * scale).backward(inputs=self.backbone.trainable_parameters())
        self._note({"distilled/expected": expected.detach().sum(1).mean()})
        return GradientStep(ids, mask, torch.full((len(ids),), torch.nan), kl.detach(), loss.detach())

    @torch.no_grad()
    def predict(self, completions: Completions) -> Tensor:
        """Distilled rewards [B] of B completions, up to a constant."""
        return self.family.token_values(self.prior.all, completions.ids, completions.mask).sum(1)

    def liked_tokens(self) -> Tensor | None:
        """What the distilled reward gives each token [V], in reward; None before `read`."""
        return None if self.texts is None else self.family.typical(self.prior.all)

    def token_counts(self) -> Tensor:
        """How often each token occurs in the texts [V], float64."""
        if self.texts is None:
            return torch.zeros(self.backbone.vocab_size, dtype=torch.float64)
        tokens = self.texts.ids[self.texts.mask.bool()]
        return torch.bincount(tokens.flatten(), minlength=self.backbone.vocab_size).double().cpu()
