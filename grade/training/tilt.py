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
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grade.errors import InputError
from grade.gradients.learner import Learner, Microbatch, StepContext
from grade.gradients.methods import AUTO, FALLBACK, METHODS, TILT
from grade.gradients.objective import GradientStep, Objective
from grade.gradients.tilt import Agreement, fit_values, gradient_values, predictions
from grade.models.batch import Completions
from grade.plugins import import_object

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.training.config import GradeConfig

logger = logging.getLogger(__name__)

SECOND_HALF = 0.5
"""Share of the steps after which ``then`` trains the adapter."""
TRIALS = (0.25, SECOND_HALF)
"""Shares of the steps after which ``then: auto`` looks. By then `rloo` has used a sixteenth and a quarter of the budget
for KL: what the bias finds later than that comes too late."""
SIGNIFICANT = 2.0
"""Standard errors by which rewards must be correlated with what the values predicted of them."""
STATE = ("texts", "rewards", "predicted", "gradient", "values", "trusted")


class TiltLearner(Learner):
    """The values of tokens, refitted every step; with ``then`` also the other method."""

    def __init__(self, config: GradeConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        if config.target_kl is None and not config.beta:
            allowed = f"a KL in nats per completion, or beta above 0, with method {TILT}: nothing else limits the bias"
            raise InputError("target_kl", None, allowed)
        if backbone.token_bias is None:
            backbone.set_token_bias(torch.zeros(backbone.vocab_size))
        self.scorer = self.second = Learner(config, backbone)
        if name := FALLBACK if config.then == AUTO else config.then:
            values = {key: getattr(config, key) for key in config.model_fields_set} | {"num_generations": config.group}
            second = config.base(**config.values_for(name, values))
            self.second = import_object(METHODS[name].learner)(second, backbone)
        # Ids and mask [N, 2, T] of all completions so far, in groups of one prompt.
        self.texts = torch.zeros(0, 2, config.max_completion_length, dtype=torch.long)
        self.rewards = torch.zeros(0, dtype=torch.float64)  # [N]
        self.predicted = self.rewards  # what was predicted of them, but for those of the first step
        self.gradient = torch.zeros(backbone.vocab_size)  # values by the reward's gradient, summed over steps
        self.values = self.gradient  # [V] in units of the reward
        self.trusted = torch.tensor(False)  # with `auto`: whether the bias has taken over

    def parameters(self) -> list[nn.Parameter]:  # noqa: D102
        return self.second.parameters()

    def tensors(self) -> dict[str, Tensor]:
        """Completions with their rewards, values, and the other method's state."""
        kept = {name: getattr(self, name) for name in STATE}
        return kept | {f"then.{name}": tensor for name, tensor in self.second.tensors().items()}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""
        for name in STATE:
            setattr(self, name, tensors[name])
        self.second.means = self.means
        names = [name for name in tensors if name.startswith("then.")]
        self.second.load_tensors({name.removeprefix("then."): tensors[name] for name in names})

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """Sample, score and refit; or a step of the other method; or both, on the same completions."""
        self.direction = None
        if self.second.config.relaxed:
            objective.require_gradient(self.config.then)
        fits, other = self._phase(context.step)
        if fits:
            microbatches = list(self.sampled(microbatches))
        learner = self.second if other else self.scorer
        parts = learner.step(microbatches, objective, context)
        self.figures, self.means = learner.figures, learner.means
        if fits:
            self._remember(parts, context)
            self._fit(microbatches, objective, context)
        if not other:
            change = self.values.to(self.backbone.device)
            if self.config.target_kl is not None:
                self.direction = change  # the budget sets the length, after the step
            else:
                change = change * (self.config.max_completion_length / objective.beta) * self.config.temperature
                self.backbone.set_token_bias(self.backbone.reference_bias() + change)
        return parts

    def _phase(self, step: int) -> tuple[bool, bool]:
        """Whether a step, from 0, fits the values, and whether it is one of the other method."""
        steps = self.config.max_steps
        late = step >= SECOND_HALF * steps
        if self.config.then != AUTO:
            other = late and self.config.then != ""
            return not other, other
        if not self.trusted and step in [math.ceil(trial * steps) for trial in TRIALS]:
            tested = self.rewards[len(self.rewards) - len(self.predicted) :]
            found = Agreement.of(self.predicted, tested, self.config.group)
            self.trusted = torch.tensor(found.t > SIGNIFICANT)
            what = "takes over" if self.trusted else f"is not used: {FALLBACK} goes on"
            logger.warning(
                f"token bias: {what} from step {step + 1}, as tokens predict {found.r2:.3f} of the variance "
                f"of new completions' rewards ({found.t:.1f} standard errors; {SIGNIFICANT:g} are asked for)"
            )
        return not late or bool(self.trusted), not self.trusted

    def _remember(self, parts: Sequence[GradientStep], context: StepContext) -> None:
        """Add completions of all processes; those are also a test of the values fitted before."""
        most, group = self.config.max_completion_length, self.config.group
        texts = [torch.stack([part.completion_ids, part.completion_mask], 1) for part in parts]
        texts = torch.cat([F.pad(each, (0, most - each.shape[2])) for each in texts]).cpu()
        rewards = torch.cat([part.reward.double() for part in parts]).cpu()
        # In the order of one process: microbatches of all processes in turn, those that share a prompt together.
        size = max(group, len(parts[0].reward))
        texts, rewards = (
            torch.stack(each).unflatten(1, (-1, size)).transpose(0, 1).flatten(0, 2)
            for each in zip(*context.gather([(texts, rewards)]), strict=True)
        )
        if len(self.rewards):
            predicted = predictions(self.values, *texts.unbind(1))
            self.predicted = torch.cat([self.predicted, predicted])
            self._note({"tilt/r2": Agreement.of(predicted, rewards, group).r2})
        self.texts, self.rewards = torch.cat([self.texts, texts]), torch.cat([self.rewards, rewards])

    def _fit(self, fresh: Sequence[Completions], objective: Objective, context: StepContext) -> None:
        if all(part.differentiable for part in objective.reward_model.learned):
            of_step = sum(gradient_values(objective, self.backbone, one) for one in fresh)
            self.gradient = self.gradient + context.total(of_step / context.microbatches).cpu()
        (ids, mask), group = self.texts.unbind(1), self.config.group
        found = Agreement.of(predictions(self.gradient, ids, mask), self.rewards, group)
        by_gradient = self.gradient * found.slope
        missed = self.rewards - (by_gradient[ids] * mask).sum(1)
        rest, r2, _ = fit_values(ids, mask, missed, len(by_gradient), group=group)
        self.values = by_gradient + (rest if r2 > 0 else 0)
