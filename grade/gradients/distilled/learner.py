"""Reward gradients for any reward: distil it, differentiate the distilled reward, correct it.

Of every completion only its reward ``R`` is used. With the values ``s_t(v)`` of a distilled reward
(`grade.gradients.distilled.families`), ``sbar_t = sum_v pi(v | y_<t) s_t(v)``, and b the leave-one-out group mean of
the preceding terms, a step ascends

    g = sum_t [ grad sbar_t + w A_t grad log pi(y_t | y_<t) ],    A_t = R - sum_u s_u(y_u) + sum_{u>t} sbar_u - b.

The first term is the plug-in, exact over all actions (Ciosek and Whiteson 2018; Petit et al. 2019): biased where s is
not the reward, with almost no noise. The second is the residual, with weight w:

- w = 1 is unbiased for every s that was fitted on other completions, here on all but the prompt's own, with a family,
  a penalty and a slope that earlier steps chose (the first step, which has none, is that of `rloo`): a
  trajectory-wise control variate (Cheng, Yan and Boots 2019, arXiv:1908.03263; Pan and Schoelkopf 2024,
  arXiv:2402.12874). A baseline of the action at t alone would gain nothing, because the noise lies in the future
  (Tucker et al. 2018, arXiv:1802.10031). The variance falls by about ``1 - R2``;
- w = 0 is the plug-in alone;
- ``auto`` takes the w of the largest expected cosine to the true gradient (`Blend`).

Values are scaled by the reward's slope on its out-of-sample prediction (`ridge.Choice`), and by the trust in earlier
predictions (`store.Evidence`): a reward that cannot be distilled gives values of 0, and g with w = 1 or ``auto`` is
that of `rloo`.

A prior is fitted to scored texts before the first step (`grade.gradients.distilled.prior`). Its values count as much as
own completions of earlier steps have confirmed, and what it misses of their rewards is distilled on top. At 512 own
completions and fewer, both on equal terms would hardly change the prior.

``R`` in A is the penalised return, ``R - beta * mean_t KL_t``, and KL's own gradient is added, as in
`grade.gradients.policy_gradient`.

Left out: several updates per step, values of the prompt.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Annotated, Literal, Self

import pydantic
import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from grade.errors import InputError
from grade.gradients.distilled.families import Family, make_family
from grade.gradients.distilled.offline import TextSettings
from grade.gradients.distilled.prior import fit_texts
from grade.gradients.distilled.ridge import Choice, centred
from grade.gradients.distilled.store import Evidence, Fit, Store, joined
from grade.gradients.losses import relative, rloo
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import GradientStep, Objective, sequence_mean
from grade.gradients.policy_gradient import (
    Completions,
    GroupSettings,
    Learner,
    Microbatch,
    StepContext,
    penalised,
    scored_rewards,
)
from grade.models.backbone import Backbone
from grade.models.head import wide
from grade.models.parameters import flatten, split_vector
from grade.models.prompts import PromptBatch, Rows, ScoredTexts
from grade.models.scoring import hidden_logps, token_kl

DECAY = 0.7
"""Of the averages over earlier measurements."""
HORIZON = 10
"""Steps that AdamW's first moment averages: 1 / (1 - 0.9)."""
EVERY = 4
"""Steps between measurements, which take two more backward passes."""


class Blend:
    """How much of the residual to add to the plug-in gradient, from squared norms over the steps so far.

    A step's gradient has two parts: the plug-in a, nearly without noise, and the residual d, with ``E[a + d] = mu``,
    the true gradient. The sum ``a + w d`` comes closest to mu in direction at

        w = E / (E + V),    E = |E d|^2,    V = tr Cov(d),

    if the two parts are orthogonal (a Wiener filter). V is measured: parts of a step that share no completion differ by
    noise alone. It is divided by the `HORIZON` steps that the optimizer's momentum averages, for noise averages out
    over steps, and bias does not. E cannot be measured within a few steps, as noise hides it. It follows from the share
    f of the squared gradient that is the plug-in's (`families.Family.share`): ``E = |a|^2 (1 - f) / f``.

    An uncertain fit counts for less. Its reliability is k t, with k the shrinkage of the slope (`ridge.Choice`) and t
    the trust (`store.Evidence`): the weight is ``1 - k t (1 - w)``, and a carries the factor k t, which E above does
    not have. So a useless fit gives `rloo` exactly, a reliable one that explains much almost the plug-in.
    """

    def __init__(self) -> None:
        self.moments = torch.zeros(3, dtype=torch.float64)  # decayed sums of ``|a|^2`` without the factor k t, V and 1
        self.before = torch.zeros(0)  # the residual of the last step, where a step has a single part

    def add(self, plug: Tensor, residual: Tensor, square: float, shares: float, reliability: float) -> None:
        """Add a step that is made of disjoint parts.

        ``plug`` is a [P], ``residual`` d [P] is the sum of the parts' ``d_i``, each of which carries its share of the
        step, and ``square`` is ``sum_i |d_i|^2``. ``shares`` is the sum of the squared shares, 1 / n for n equal parts;
        with a single part (1), the last step is the other one.
        """
        whole = float(residual.double() @ residual.double())
        if shares < 1:
            signal = (whole - float(square)) / (1 - shares)  # |E d|^2 from products of different parts, very noisy
        else:
            signal = float(residual.double() @ self.before.double()) if len(self.before) else 0.0
            self.before = residual
        size = float(plug.double() @ plug.double()) / reliability**2
        step = torch.tensor([size, max(whole - signal, 0.0), 1.0], dtype=torch.float64)
        self.moments = DECAY * self.moments + step

    def weight(self, share: float, reliability: float) -> float:
        """The residual's weight; ``share`` is f, the plug-in's share of the squared gradient.

        >>> blend = Blend()
        >>> blend.moments = torch.tensor([1.0, 30.0, 1.0], dtype=torch.float64)
        >>> blend.weight(0.25, 1.0)                         # E = 3, V = 30 / 10: w = 1/2
        0.5
        >>> blend.weight(0.25, 0.5), blend.weight(0.25, 0.0)
        (0.75, 1.0)
        """
        plug, noise, steps = self.moments.tolist()
        if not steps or not share > 0 or not plug > 0:
            return 1.0
        missing = plug * (1 - share) / share
        if not missing + noise > 0:
            return 1 - reliability
        return 1 - reliability * (1 - missing / (missing + noise / HORIZON))


@dataclass(frozen=True)
class Sample(Rows):
    """Scored completions of a microbatch."""

    prompts: PromptBatch  # B prompts
    ids: Tensor  # completions [B, T]
    mask: Tensor  # [B, T]
    reference: Tensor  # the frozen base's hidden states that predict each token [B, T, D]
    reward: Tensor  # [B], NaN where no function scored
    rows: dict[str, Tensor]  # features of each family


class DistilledSettings(TextSettings, GroupSettings):
    """Settings of `distilled`."""

    residual_weight: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        "auto", description="weight of what the distilled reward misses: 0 biased, 1 unbiased, auto from the gradients"
    )
    distil_window: PositiveInt = Field(
        2048, description="completions that are kept for the fit; the oldest are dropped first"
    )

    @pydantic.model_validator(mode="after")
    def _check_window(self) -> Self:
        if self.distil_window < 2 * self.group:
            allowed = f"at least {2 * self.group}: two groups of {self.group}, as each is judged by the others"
            raise InputError("distil_window", self.distil_window, allowed)
        return self


class DistilledGradient(Learner):
    """The method, with everything that it has seen."""

    def __init__(self, config: MethodConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        self.families: dict[str, Family] = {name: make_family(name, backbone) for name in config.distil_families}
        self.store = Store(self.families, config.group, config.distil_window)
        self.prior: Fit | None = None
        self.transfer, self.evidence, self.blend = Evidence(), Evidence(), Blend()
        self.fit: Fit | None = None
        self.intercept, self.trust, self.steps = 0.0, 1.0, 0

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint."""
        tensors = self.store.state() | {"blend": self.blend.moments, "residual": self.blend.before}
        tensors["level"] = torch.tensor([self.intercept, self.steps], dtype=torch.float64)
        for name, evidence in (("evidence", self.evidence), ("transfer", self.transfer)):
            tensors |= {f"{name}/{number}": groups for number, groups in enumerate(evidence.groups)}
        if self.fit is not None:
            choice = torch.tensor(astuple(self.fit.choice), dtype=torch.float64)
            tensors |= {f"fit/{self.fit.family}": self.fit.weights[:1], "fitted": choice}
        return tensors

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Continue where `tensors` was taken."""
        self.fit = None  # of steps after that
        self.store.restore(tensors)
        self.blend.moments, self.blend.before = tensors["blend"], tensors["residual"].to(self.backbone.device)
        self.intercept, self.steps = float(tensors["level"][0]), int(tensors["level"][1])
        for kind, evidence in (("evidence/", self.evidence), ("transfer/", self.transfer)):
            evidence.groups = [tensors[name] for name in sorted(tensors) if name.startswith(kind)]
        for name in tensors:
            kind, _, family = name.partition("/")
            if kind == "fit":
                self.fit = Fit(family, tensors[name].to(self.backbone.device), Choice(*tensors["fitted"].tolist()))

    def read(self, texts: ScoredTexts) -> None:
        """Take the reward distilled from scored texts as prior, if they explain anything of it."""
        prior = fit_texts(self.families, texts)
        if prior.choice.significant:
            self.prior = prior
        else:
            r2 = prior.choice.r2
            warnings.warn(f"{len(texts)} texts explain {r2:.3f} of the reward: they are not used", stacklevel=2)

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
        self._note({"distilled/seconds": time.perf_counter() - start})
        steps = self._accumulate(samples, objective, context)
        context.apply()
        return steps

    @torch.no_grad()
    def scored(self, completions: Completions, objective: Objective) -> Sample:
        """Completions with rewards and features."""
        prompts, ids, mask = completions.text
        reward = scored_rewards(self.backbone, prompts, ids, mask, objective)
        rows = {name: family.rows(ids, mask) for name, family in self.families.items()}
        return Sample(prompts, ids, mask, self.reference(prompts, ids), reward, rows)

    @torch.no_grad()
    def update_fit(self, samples: list[Sample], context: StepContext) -> None:
        """Score the last fit on the new rewards, add them, and refit."""
        parts = []
        for number, sample in enumerate(samples):
            rows = sample.rows | {"tokens": torch.where(sample.mask.bool(), sample.ids, -1)}
            parts.append((number, sample.reward.cpu(), {name: each.cpu() for name, each in rows.items()}))
        # Sorted by microbatch, then by rank: the order of one process.
        _, scores, parts = zip(*sorted(context.gather(parts), key=lambda part: part[0]), strict=True)
        rewards, group = torch.cat(scores), self.config.group
        # A completion without a reward counts as its group's mean: no better, no worse.
        differences = relative(rewards.view(-1, group)).flatten().nan_to_num(0.0).double()
        rows = {name: joined([part[name] for part in parts]).to(self.backbone.device) for name in parts[0]}
        prior, predicted = self._predict(self.prior, rows), self._predict(self.fit, rows)
        # Of the steps before: this step's rewards must not weigh their own gradient.
        self.trust, self.store.prior_weight, missed = self.evidence.trust, self.transfer.trust, differences
        if prior is not None:
            missed = differences - self.store.prior_weight * centred(prior, group)
            self._note({"distilled/transfer": self.store.prior_weight})
            self.transfer.add(centred(prior, group), differences, group)
        if predicted is not None:
            self._note({"distilled/reward": predicted.mean() + self.intercept})
            self.evidence.add(centred(predicted, group), missed, group)
        tokens = rows.pop("tokens")
        self.store.append(rows, differences, tokens, prior)
        if self.fit is not None and not self.store.refit_due:
            self.fit = replace(self.fit, weights=self.fit.weights[:1], predates=True)
        else:
            predates, fit = bool(self.store.choices), self.store.fit(len(rewards) // group)
            self.fit = fit and replace(fit, predates=predates)
        figures = {"trust": self.trust, "completions": float(len(self.store)), "dropped": float(self.store.dropped)}
        if self.fit is not None:
            self.intercept = float(rewards.double().nanmean().nan_to_num(0.0) - self._predict(self.fit, rows).mean())
            figures |= {f"r2/{name}": choice.r2 for name, choice in self.store.choices.items()}
            figures |= {"r2": self.fit.choice.r2, "slope": self.fit.choice.slope}
        elif not self.store.kept["rewards"].any():
            warnings.warn("the reward is equal within every group so far: nothing is learned from it", stacklevel=3)
        self._note({f"distilled/{name}": value for name, value in figures.items()})

    def _predict(self, fit: Fit | None, rows: dict[str, Tensor]) -> Tensor | None:
        return None if fit is None else self.families[fit.family].predict(fit.all[0], rows[fit.family]).double().cpu()

    def token_counts(self) -> Tensor:
        """How often each token occurs in the completions that are kept [V], float64."""
        return self.store.token_counts(self.backbone.vocab_size)

    @torch.no_grad()
    def liked_tokens(self) -> Tensor | None:
        """What the distilled reward gives each token [V], in reward; None before the first fit.

        By the family with the largest R2, whichever the gradient used.
        """
        if self.steps == 0:
            return None
        fits = [(self.prior, self.store.prior_weight)] if self.prior is not None else []
        name = self.store.best_of(self.families)
        if name is not None and self.fit is not None:
            fits.append((self.fit if self.fit.family == name else self.store.fit_of(name, 0), 1.0))
        each = [self.families[fit.family].typical(fit.all * weight) for fit, weight in fits]
        return sum(each[1:], each[0]) if each else None

    # ---- the gradient ----
    def _accumulate(self, samples: list[Sample], objective: Objective, context: StepContext) -> list[GradientStep]:
        each, weight = 1 / context.microbatches, self.config.residual_weight
        measured = weight == "auto" and self.reliability > 0 and self.steps % EVERY == 0
        if weight == "auto":
            weight = self._weight()
        steps, parts = [], []
        for number, sample in enumerate(samples):
            place = number * (context.microbatches // len(samples)) + context.rank
            kl = torch.zeros(sample.mask.shape, dtype=wide(self.backbone.dtype), device=self.backbone.device)
            size, group = len(sample.reward), self.config.group
            half = size // group // 2 * group if measured and context.microbatches == 1 else 0
            for rows in [slice(0, half), slice(half, size)] if half else [slice(0, size)]:  # whole groups
                part = sample[rows]
                share = each * len(part.reward) / size
                hidden = self.hidden(part.prompts, part.ids)
                losses, kl[rows] = self.losses_from(hidden, part, (place * size + rows.start) // group, objective)
                if measured:
                    parts.append((share, [self._gradient(loss * share) for loss in losses]))
                else:
                    plug, residual, penalty = losses
                    total = (plug + weight * residual + penalty) * share
                    torch.autograd.backward(total, inputs=self.backbone.trainable_parameters())
            loss = -penalised(sample.reward, kl, sample.mask, objective.beta).nanmean().nan_to_num(0.0)
            steps.append(GradientStep(sample.ids, sample.mask, sample.reward, kl, loss))
        if measured:
            weight = self._blend(parts, context)
        self.steps += 1
        self._note({"residual_weight": float(weight)})
        return steps

    def _gradient(self, loss: Tensor) -> Tensor:
        parameters = self.backbone.trainable_parameters()
        if not loss.requires_grad:
            return torch.zeros(sum(p.numel() for p in parameters), device=self.backbone.device)
        # Adapted layers may have no part in text: the vision tower's.
        return flatten(torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True))

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
        """K t in 0..1: the shrinkage of the fit's slope times the trust in its predictions; the values carry both.

        A prior is relied on as far as it transfers; the two are taken to err independently.
        """
        own = 0.0 if self.fit is None else self.fit.choice.shrinkage * self.trust
        return own if self.prior is None else 1 - (1 - own) * (1 - self.store.prior_weight)

    def _explained(self) -> float:
        """Share f of the squared gradient that is taken to be the distilled reward's."""
        own = 0.0 if self.fit is None else self.families[self.fit.family].share(self.fit.choice.r2)
        if self.prior is None:
            return own
        weight = self.store.prior_weight
        prior = min(1.0, self.transfer.r2(weight) if self.transfer.groups else self.prior.choice.r2)
        return math.sqrt(1 - (1 - prior) * (1 - own * own))

    def _weight(self) -> float:
        return self.blend.weight(self._explained(), self.reliability) if self.reliability > 0 else 1.0

    def losses_from(
        self, hidden: Tensor, sample: Sample, first: int, objective: Objective
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Losses of plug-in, residual and KL, three scalars to be minimised, and KL [B, T].

        From hidden states [B, T, D] that predict the tokens of whole groups. ``first`` is the number of the first group
        in the step, over all processes. Of the objective only KL's weight and the teacher are used.
        """
        backbone, group, ids, mask = self.backbone, self.config.group, sample.ids, sample.mask
        least = self.config.min_completion_length
        logps = hidden_logps(backbone, hidden, ids, mask, min_new_tokens=least)
        kl = token_kl(backbone, hidden, sample.reference, mask)
        reward = relative(sample.reward.view(-1, group)).flatten()
        returns = penalised(reward, kl, mask, objective.beta).detach()
        returns = returns.unsqueeze(1).expand(mask.shape)
        plug = hidden.new_zeros(())
        # Selecting on this step's rewards biases the gradient by a few percent, so w = 1 forbids it.
        usable = self.fit is not None and (self.fit.predates or self.config.residual_weight != 1)
        fits = [(self.prior, self.prior.all * self.store.prior_weight)] if self.prior is not None else []
        if usable and self.fit.choice.slope > 0:
            fits.append((self.fit, self.fit.without(first, len(ids) // group) * self.trust))
        for fit, weights in fits:
            family = self.families[fit.family]
            expected = family.expected(weights, ids, mask, hidden, least)
            plug = plug - expected.sum(1).mean()
            future = expected.detach().flip(1).cumsum(1).flip(1) - expected.detach()
            returns = returns - family.token_values(weights, ids, mask).sum(1, keepdim=True) + future
        advantages = rloo(returns.reshape(-1, group, mask.shape[1]).transpose(1, 2).reshape(-1, group))
        advantages = advantages.view(-1, mask.shape[1], group).transpose(1, 2).reshape(mask.shape)
        residual = -(advantages.detach() * logps * mask).sum(1).mean()
        penalty = objective.beta * sequence_mean(kl, mask).mean()
        if (taught := objective.taught(hidden, sample.prompts, ids, mask)) is not None:
            penalty = penalty + sequence_mean(taught, mask).mean()
        return (plug, residual, penalty), kl.detach()
