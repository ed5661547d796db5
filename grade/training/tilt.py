"""Method `tilt`: no adapter and no gradient descent, but a token bias fitted to what is known of the reward.

Each step samples completions of the policy, has them scored, refits the values of tokens on all completions so far
(`grade.gradients.tilt`), and sets the bias along them: at the length whose KL is the step's budget with ``target_kl``,
else at ``values * T / beta`` (times the temperature, by which the bias is divided too), the maximum of
``E[sum_t s(y_t)] - beta * mean_t KL_t`` at every position. Completions of former biases are as good as new ones: the
regression compares completions of one prompt, whoever wrote them.

A differentiable reward is also asked for its gradient; the regression then explains what that misses.

With ``then`` the bias is kept as it is from the middle of the run on, and another method trains the adapter beside it:
what context explains, a bias cannot have. With ``then: auto`` the order is the other: `rloo` begins, and the values are
fitted to its completions. After a quarter or half of the run the bias takes over, if these values predicted rewards of
completions that they were not fitted on; otherwise `rloo` goes on, as if nothing had been fitted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grade.errors import InputError
from grade.gradients.learner import Learner, Microbatch, StepContext
from grade.gradients.methods import AUTO, FALLBACK, METHODS, TILT
from grade.gradients.objective import GradientStep, Objective, sequence_mean
from grade.gradients.tilt import Agreement, fit_values, gradient_values
from grade.models.batch import Completions
from grade.models.scoring import kl_and_entropy
from grade.plugins import import_object

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.training.config import GradeConfig

logger = logging.getLogger(__name__)

SECOND_HALF = 0.5
"""Share of the steps after which ``then`` trains the adapter."""
TRIALS = (0.25, 0.5)
"""Shares of the steps after which ``then: auto`` looks. By then `rloo` has used a sixteenth and a quarter of the budget
for KL: what the bias finds later than that comes too late."""
SIGNIFICANT = 2.0
"""Standard errors by which rewards must be correlated with what the values predicted of them."""


class TiltLearner(Learner):
    """The values of tokens, refitted every step; with ``then`` also the other method."""

    def __init__(self, config: GradeConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        if config.target_kl is None and not config.beta:
            allowed = f"a KL in nats per completion, or beta above 0, with method {TILT}: nothing else limits the bias"
            raise InputError("target_kl", None, allowed)
        if backbone.token_bias is None:
            backbone.set_token_bias(torch.zeros(backbone.vocab_size))
        name = FALLBACK if config.then == AUTO else config.then
        self.second: Learner | None = None
        if name:
            values = {key: getattr(config, key) for key in config.model_fields_set} | {"num_generations": config.group}
            second = config.base(**config.values_for(name, values))
            self.second = import_object(METHODS[name].learner)(second, backbone)
        rows = torch.zeros(0, config.max_completion_length, dtype=torch.long)
        # All completions so far, in groups of one prompt.
        self.ids, self.mask, self.rewards = rows, rows.clone(), torch.zeros(0, dtype=torch.float64)
        self.gradient = torch.zeros(backbone.vocab_size)  # values by the reward's gradient, summed over steps
        self.values: Tensor | None = None  # [V] in units of the reward
        self.agreement = Agreement()  # of all rewards with what was predicted of them
        self.trusted = False  # with `auto`: whether the bias has taken over

    def parameters(self) -> list[nn.Parameter]:  # noqa: D102
        return [] if self.second is None else self.second.parameters()

    def tensors(self) -> dict[str, Tensor]:
        """Completions with their rewards, values, and the other method's state."""
        found = torch.tensor(astuple(self.agreement), dtype=torch.float64)
        kept = {"ids": self.ids, "mask": self.mask, "rewards": self.rewards, "gradient": self.gradient,
                "agreement": found, "trusted": torch.tensor(self.trusted)}  # fmt: skip
        if self.values is not None:
            kept["values"] = self.values
        other = {} if self.second is None else self.second.tensors()
        return kept | {f"then.{name}": tensor for name, tensor in other.items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""
        self.ids, self.mask, self.rewards = (tensors[name] for name in ("ids", "mask", "rewards"))
        self.gradient, self.values = tensors["gradient"], tensors.get("values")
        self.agreement, self.trusted = Agreement(*tensors["agreement"].tolist()), bool(tensors["trusted"])
        if self.second is not None:
            self.second.means = self.means
            names = [name for name in tensors if name.startswith("then.")]
            self.second.load_tensors({name.removeprefix("then."): tensors[name] for name in names})

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """Sample, score and refit; or a step of the other method; or both, on the same completions."""
        self.figures, self.direction = {}, None
        if self.second is not None and self.second.config.relaxed:
            objective.require_gradient(self.config.then)
        fits, other = self._phase(context.step)
        if not fits:
            return self._other(microbatches, objective, context)
        fresh = list(self.sampled(microbatches))
        if other:
            parts = self._other(fresh, objective, context)
        else:
            parts = [self._scored(completions, objective) for completions in fresh]
        self._remember(parts, context)
        self._fit(fresh, objective, context)
        if not other:
            self._set_bias(objective)
            context.apply()  # no gradient: callbacks and the learning rate's schedule see a step
        return parts

    def _phase(self, step: int) -> tuple[bool, bool]:
        """Whether a step, from 0, fits the values, and whether it is one of the other method."""
        share, last = step / self.config.max_steps, (step - 1) / self.config.max_steps
        if self.second is None:
            return True, False
        if self.config.then != AUTO:
            return share < SECOND_HALF, share >= SECOND_HALF
        if not self.trusted and any(last < trial <= share for trial in TRIALS):
            self.trusted = self.agreement.t > SIGNIFICANT
            what = "takes over" if self.trusted else f"is not used: {FALLBACK} goes on"
            logger.warning(
                f"token bias: {what} from step {step + 1}, as tokens predict {self.agreement.r2:.3f} of the variance "
                f"of new completions' rewards ({self.agreement.t:.1f} standard errors; {SIGNIFICANT:g} are asked for)"
            )
        return self.trusted or share < TRIALS[-1], not self.trusted

    def _other(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        parts = self.second.step(microbatches, objective, context)
        self.figures, self.means = self.second.figures, self.second.means
        return parts

    @torch.no_grad()
    def _scored(self, completions: Completions, objective: Objective) -> GradientStep:
        prompts, ids, mask = completions.text
        reward = self.rewards_of(prompts, ids, mask, objective)
        states = self.hidden(prompts, ids), self.reference(prompts, ids)
        kl, entropy = kl_and_entropy(self.backbone, *states, mask)
        loss = -(reward - objective.beta * sequence_mean(kl, mask)).nanmean().nan_to_num(0.0)
        return GradientStep(ids, mask, reward, kl, loss, scores=objective.reward_model.last, entropy=entropy)

    def _remember(self, parts: Sequence[GradientStep], context: StepContext) -> None:
        """Add completions of all processes; those are also a test of the values fitted before."""
        rows = [(part.completion_ids.cpu(), part.completion_mask.cpu(), part.reward.double().cpu()) for part in parts]
        rows = context.gather(rows)
        number = len(parts)
        together = max(1, self.config.group // len(parts[0].reward))  # microbatches that share a prompt
        starts = [start + i for start in range(0, number, together) for i in range(0, len(rows), number)]
        rows = [row for start in starts for row in rows[start : start + together]]  # as one process has them
        missing = [(0, self.ids.shape[1] - ids.shape[1]) for ids, _, _ in rows]
        ids, mask = (torch.cat([F.pad(row[i], pad) for row, pad in zip(rows, missing, strict=True)]) for i in (0, 1))
        rewards = torch.cat([row[2] for row in rows])
        if self.values is not None:
            found = Agreement.of(self.values, ids, mask, rewards, self.config.group)
            self.agreement += found
            self._note({"tilt/r2": found.r2})
        self.ids, self.mask = torch.cat([self.ids, ids]), torch.cat([self.mask, mask])
        self.rewards = torch.cat([self.rewards, rewards])

    def _fit(self, fresh: Sequence[Completions], objective: Objective, context: StepContext) -> None:
        rewards, by_gradient = self.rewards, torch.zeros_like(self.gradient)
        if all(part.differentiable for part in objective.reward_model.learned):
            of_step = [gradient_values(objective, self.backbone, [one.text]) for one in fresh]
            self.gradient += context.total(sum(of_step) / context.microbatches).cpu()
            found = Agreement.of(self.gradient, self.ids, self.mask, rewards, self.config.group)
            by_gradient = self.gradient * found.slope
            rewards = rewards - (by_gradient[self.ids] * self.mask).sum(1)
        rest = fit_values(self.ids, self.mask, rewards, len(self.gradient), group=self.config.group)
        self.values = by_gradient + (rest.values if rest.r2 > 0 else 0)

    def _set_bias(self, objective: Objective) -> None:
        """Along the values: the budget sets the length, after the step, or beta."""
        if self.config.target_kl is not None:
            self.direction = self.values.to(self.backbone.device)
        else:
            length = self.config.max_completion_length / objective.beta
            change = (self.values * length * self.config.temperature).to(self.backbone.device)
            self.backbone.set_token_bias(self.backbone.reference_bias() + change)
