"""Reward gradients for any reward: distil it, differentiate the distilled reward, correct it.

Of every completion only its reward ``R`` is used. With the values ``s_t(v)`` of a distilled reward
(`grade.gradients.distilled.families`), ``sbar_t = sum_v pi(v | y_<t) s_t(v)``, and b the leave-one-out group mean of
the preceding terms, a step ascends

    g = sum_t [ grad sbar_t + w A_t grad log pi(y_t | y_<t) ],    A_t = R - sum_u s_u(y_u) + sum_{u>t} sbar_u - b.

The first term is the plug-in, exact over all actions (Ciosek and Whiteson 2018; Petit et al. 2019): biased where s is
not the reward, with almost no noise. The second is the residual, with weight w:

- w = 1 is unbiased for every s that was fitted on other completions, here on all but the prompt's own, with a family
  and a slope that earlier steps chose (the first step, which has none, is that of `rloo`): a trajectory-wise control
  variate (Cheng, Yan and Boots 2019, arXiv:1908.03263; Pan and Schoelkopf 2024, arXiv:2402.12874). A baseline of the
  action at t alone would gain nothing, because the noise lies in the future (Tucker et al. 2018, arXiv:1802.10031). The
  variance falls by about ``1 - R2``;
- w = 0 is the plug-in alone;
- ``auto`` takes the w of the largest expected cosine to the true gradient (`grade.gradients.distilled.blend`).

Values are scaled by the reward's slope on its out-of-sample prediction (`ridge.Choice`), and by the trust in earlier
predictions (`store.Evidence`): a reward that cannot be distilled gives values of 0, and g with w = 1 or ``auto`` is
that of `rloo`. With a `trunk` family, which is not additive, the plug-in is straight-through (`st`), the residual what
`rloo` has beyond it.

``R`` in A is the penalised return, ``R - beta * mean_t KL_t``, and KL's own gradient is added, as in
`grade.gradients.policy_gradient`.

Left out: several updates per step, values of the prompt.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from grade.gradients.all_action import expected_values
from grade.gradients.distilled.blend import EVERY, Blend
from grade.gradients.distilled.families import Family, Observed, make_family
from grade.gradients.distilled.ridge import Choice, centred
from grade.gradients.distilled.store import Evidence, Fit, Store, joined
from grade.gradients.losses import rloo
from grade.gradients.methods import FAMILIES, MethodConfig
from grade.gradients.objective import GradientStep, Objective, check_finite, sequence_mean
from grade.gradients.policy_gradient import Completions, Learner, Microbatch, StepContext, penalised
from grade.models.backbone import Backbone
from grade.models.head import wide
from grade.models.parameters import flatten, split_vector
from grade.models.sampling import early_rows
from grade.models.scoring import completion_states, hidden_logps, predicting_hidden, token_kl


@dataclass(frozen=True)
class Sample:
    """Scored completions of a microbatch.

    Attributes:
        seen: Completions, with the base's states.
        reward: [B].
        rows: Features of each family.
    """

    seen: Observed
    reward: Tensor
    rows: dict[str, Tensor]


class DistilledGradient(Learner):
    """The method, with everything that it has seen.

    Attributes:
        store: Completions, rewards, fits.
    """

    def __init__(self, config: MethodConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        names = config.distil_families or FAMILIES
        self.families: dict[str, Family] = {name: make_family(name, backbone) for name in names}
        self.store = Store(self.families, config.group, config.distil_window)
        self.evidence, self.blend = Evidence(), Blend()
        self.fit: Fit | None = None
        self.intercept, self.trust, self.steps = 0.0, 1.0, 0
        self.last: Observed | None = None

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        tensors = self.store.state() | {"blend": self.blend.moments, "residual": self.blend.before}
        tensors["level"] = torch.tensor([self.intercept, self.steps], dtype=torch.float64)
        tensors |= {f"evidence/{number}": groups for number, groups in enumerate(self.evidence.groups)}
        if self.fit is not None:
            choice = torch.tensor(astuple(self.fit.choice), dtype=torch.float64)
            tensors |= {f"fit/{self.fit.family}": self.fit.weights[:1], "fitted": choice}
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""
        self.store.restore(tensors)
        self.blend.moments, self.blend.before = tensors["blend"], tensors["residual"].to(self.backbone.device)
        self.intercept, self.steps = float(tensors["level"][0]), int(tensors["level"][1])
        numbers = range(sum(name.startswith("evidence/") for name in tensors))
        self.evidence.groups = [tensors[f"evidence/{number}"] for number in numbers]
        for name in (name for name in tensors if name.startswith("fit/")):
            family = name.removeprefix("fit/")
            self.fit = Fit(family, tensors[name].to(self.backbone.device), Choice(*tensors["fitted"].tolist()))

    def step(
        self, microbatches: Iterable[Microbatch], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """Sample completions, score and distil them, and add the gradient; one result per microbatch.

        Microbatches are this process's prompts, each once, with the generator for their completions; or completions of
        another sampler, whose policy is taken for the trained one: the residual's weight assumes its samples.
        """
        self.figures = {}
        samples = [self.scored(each, objective) for each in self.sampled(microbatches)]
        start = time.perf_counter()
        self.update_fit(samples, context)
        self._note("distilled/seconds", torch.tensor(time.perf_counter() - start))
        steps = self._accumulate(samples, objective, context)
        self.last = samples[-1].seen
        context.apply()
        return steps

    @torch.no_grad()
    def scored(self, completions: Completions, objective: Objective) -> Sample:
        """Completions with rewards, which must be finite, and features."""
        prompts, ids, mask = completions.prompts, completions.ids, completions.mask
        reward = objective.score(self.backbone, prompts, ids, mask)
        check_finite(reward, reward)
        depths = sorted({family.depth for family in self.families.values() if family.depth is not None})
        seen = Observed(prompts, ids, mask, completion_states(self.backbone, prompts, ids, mask, depths))
        return Sample(seen, reward, {name: family.rows(seen) for name, family in self.families.items()})

    @torch.no_grad()
    def update_fit(self, samples: list[Sample], context: StepContext) -> None:
        """Score the last fit on the new rewards, add them, and refit."""
        tokens = [torch.where(s.seen.mask.bool(), s.seen.ids, -1) for s in samples]
        parts = [(number, s.reward.cpu(), {k: v.cpu() for k, v in (s.rows | {"": own}).items()})
                 for number, (s, own) in enumerate(zip(samples, tokens, strict=True))]  # fmt: skip
        parts = context.gather(parts)
        parts.sort(key=lambda part: part[0])  # by microbatch, then by rank: the order of one process
        rewards = torch.cat([reward for _, reward, _ in parts]).double()
        device = self.backbone.device
        rows = {name: joined([part[name] for _, _, part in parts]).to(device) for name in ("", *self.families)}
        predicted = self._predict(rows)
        self.trust = self.evidence.trust  # of the steps before: this step's rewards must not weigh their own gradient
        if predicted is not None:
            self._note("distilled/reward", predicted.mean() + self.intercept)
            group = self.config.group
            self.evidence.add(centred(predicted, group), centred(rewards, group), group)
        self.store.append({name: rows[name] for name in self.families}, rewards, rows[""])
        if self.fit is not None and not self.store.refit_due:
            self.fit = replace(self.fit, weights=self.fit.weights[:1], predates=True)
        else:
            predates, fit = bool(self.store.choices), self.store.fit(len(rewards) // self.config.group)
            self.fit = fit and replace(fit, predates=predates)
        if self.fit is None:
            warnings.warn("the reward is equal within every group so far: nothing is learned from it", stacklevel=3)
        else:
            self.intercept = float(rewards.mean() - self._predict(rows).mean())
            for name, choice in self.store.choices.items():
                self._note(f"distilled/r2/{name}", torch.tensor(choice.r2))
            self._note("distilled/r2", torch.tensor(self.fit.choice.r2))
            self._note("distilled/slope", torch.tensor(self.fit.choice.slope))
        self._note("distilled/trust", torch.tensor(self.trust))
        self._note("distilled/completions", torch.tensor(float(len(self.store))))
        self._note("distilled/dropped", torch.tensor(float(self.store.dropped)))

    def _predict(self, rows: dict[str, Tensor]) -> Tensor | None:
        if self.fit is None:
            return None
        return self.families[self.fit.family].predict(self.fit.all[0], rows[self.fit.family]).double().cpu()

    @torch.no_grad()
    def liked_tokens(self) -> Tensor | None:
        """What the distilled reward gives each token [V], in reward, averaged over the positions of the last batch.

        By the additive family with the largest R2, whichever the gradient used. None before the first fit, or without
        such a family.
        """
        name = self.store.best_of([name for name, family in self.families.items() if family.additive])
        if name is None or self.fit is None or self.last is None:
            return None
        fit = self.fit if self.fit.family == name else self.store.fit_of(name, 0)
        return self.families[name].typical(fit.all, self.last)

    # ---- the gradient ----
    def _accumulate(self, samples: list[Sample], objective: Objective, context: StepContext) -> list[GradientStep]:
        each, weight, measured = 1 / context.microbatches, self.config.residual_weight, False
        if weight == "auto":
            measured = self.reliability > 0 and self.steps % EVERY == 0
            weight = 1.0 if measured else self._weight()
        steps, parts = [], []
        for number, sample in enumerate(samples):
            place = number * (context.microbatches // len(samples)) + context.rank
            seen = sample.seen
            kl = torch.zeros(seen.mask.shape, dtype=wide(self.backbone.dtype), device=self.backbone.device)
            size, group = len(sample.reward), self.config.group
            half = size // group // 2 * group if measured and context.microbatches == 1 else 0
            for rows in [slice(0, half), slice(half, size)] if half else [slice(0, size)]:  # whole groups
                share = each * len(sample.reward[rows]) / len(sample.reward)
                part = seen[rows]
                with self.backbone.checkpointed_layers(bool(self.config.gradient_checkpointing)):
                    hidden = predicting_hidden(self.backbone, part.prompts, part.ids)
                losses, kl[rows] = self.losses_from(hidden, sample, rows, place, objective)
                if measured:
                    parts.append((share, [self._gradient(loss * share) for loss in losses]))
                else:
                    plug, residual, penalty = losses
                    total = (plug + weight * residual + penalty) * share
                    torch.autograd.backward(total, inputs=self.backbone.trainable_parameters())
            loss = -penalised(sample.reward, kl, seen.mask, objective.beta).mean()
            steps.append(GradientStep(seen.ids, seen.mask, sample.reward, kl, loss))
        if measured:
            weight = self._blend(parts, context)
        self.steps += 1
        self._note("residual_weight", torch.tensor(float(weight)))
        return steps

    def _gradient(self, loss: Tensor) -> Tensor:
        parameters = self.backbone.trainable_parameters()
        if not loss.requires_grad:
            return torch.zeros(sum(p.numel() for p in parameters), device=self.backbone.device)
        return flatten(torch.autograd.grad(loss, parameters, retain_graph=True))

    def _blend(self, parts: list[tuple[float, list[Tensor]]], context: StepContext) -> float:
        """Add the blended gradient of all parts; the weight."""
        plug, residual, penalty = (torch.stack(each).sum(0) for each in zip(*(g for _, g in parts), strict=True))
        square = torch.stack([d.double() @ d.double() for _, (_, d, _) in parts]).sum()
        shares = torch.tensor([share * share for share, _ in parts], dtype=torch.float64, device=square.device).sum()
        square, shares = context.total(torch.stack([square, shares])).tolist()
        self.blend.add(context.total(plug), context.total(residual), square, shares, self.reliability)
        weight = self._weight()
        gradient = plug + weight * residual + penalty
        parameters = self.backbone.trainable_parameters()
        for p, g in zip(parameters, split_vector(self.backbone, gradient), strict=True):
            p.grad = g if p.grad is None else p.grad + g
        return weight

    @property
    def reliability(self) -> float:
        """K t in 0..1: the shrinkage of the fit's slope times the trust in its predictions; the values carry both."""
        return 0.0 if self.fit is None else self.fit.choice.shrinkage * self.trust

    def _weight(self) -> float:
        return self.blend.weight(self.fit.choice.explained, self.reliability) if self.reliability > 0 else 1.0

    def losses_from(
        self, hidden: Tensor, sample: Sample, rows: slice, place: int, objective: Objective
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Losses of plug-in, residual and KL, three scalars to be minimised, and KL [b, T].

        From hidden states [b, T, D] that predict the tokens of some rows of a microbatch, whole groups. ``place`` is
        the number of the microbatch in the step, over all processes. Of the objective only KL's weight is used.
        """
        whole, backbone, group = sample.seen, self.backbone, self.config.group
        seen, mask = whole[rows], whole.mask[rows]
        least = self.config.min_completion_length
        logps = hidden_logps(backbone, hidden, seen.ids, mask, min_new_tokens=least)
        kl = token_kl(backbone, hidden, seen.states.predicting, mask)
        returns = penalised(sample.reward[rows], kl, mask, objective.beta).detach()
        returns = returns.unsqueeze(1).expand(mask.shape)
        plug, additive = hidden.new_zeros(()), True
        # Selecting on this step's rewards biases the gradient by a few percent, so w = 1 forbids it.
        usable = self.fit is not None and (self.fit.predates or self.config.residual_weight != 1)
        if usable and self.fit.choice.slope > 0:
            family = self.families[self.fit.family]
            first = place * len(whole.ids) // group + rows.start // group
            weights = self.fit.without(first, len(seen.ids) // group) * self.trust
            expected = self._expected(hidden, family.values(weights, seen), mask)
            plug, additive = -expected.sum(1).mean(), family.additive
            if additive:
                future = expected.detach().flip(1).cumsum(1).flip(1) - expected.detach()
                returns = returns - family.own(weights, seen).sum(1, keepdim=True) + future
        advantages = rloo(returns.reshape(-1, group, mask.shape[1]).transpose(1, 2).reshape(-1, group))
        advantages = advantages.view(-1, mask.shape[1], group).transpose(1, 2).reshape(mask.shape)
        residual = -(advantages.detach() * logps * mask).sum(1).mean() - (0.0 if additive else plug)
        return (plug, residual, objective.beta * sequence_mean(kl, mask).mean()), kl.detach()

    def _expected(self, hidden: Tensor, values, mask: Tensor) -> Tensor:
        """``sbar`` [b, T] of the distribution that was sampled from."""
        early, eos = early_rows(mask, self.config.min_completion_length), self.backbone.eos_token_ids
        return expected_values(self.backbone.head, hidden.flatten(0, 1), values, eos, early).view(mask.shape) * mask
