"""What one sample of a distilled reward's gradient is worth, on a language model at fixed weights.

Rewards are distilled from N completions of other prompts, one family at a time, and the learner's own losses
(`grade.gradients.distilled.learner`) give the plug-in and the residual of fresh completions. From the same graph of the
same completions come `rloo` and, where the reward is differentiable, `st` and `ste`.

A row is one batch: G completions of each of B random prompts. All gradients are ascent directions of the same number,
the expected reward over prompts. The truth is the mean of `rloo` over many more completions than the other estimators
get: row i of the reference is the mean of row i's own completions and of further batches, so products of different rows
are still unbiased (`grade.experiments.moments`).
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.experiments.any_reward.measure.explained import fitted_ascent, scored_completions
from grade.experiments.intervals import Interval
from grade.experiments.measured import Size
from grade.experiments.moments import moments, sketch, worth_interval
from grade.experiments.rewards import DIFFERENTIABLE, GROUP, FamilyName, Policy, RewardName, Subject
from grade.gradients.distilled.store import Fit, Store
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import condition
from grade.results import progress

SKETCH = 2**15
"""Numbers that are kept of a gradient."""
WEIGHTS = (0.3, 1.0)
"""Weights of the residual in the corrected form."""
SEED = 1_000_003
"""Of the first row's prompts and completions; that of the others follows it."""


class Gradients(Config):
    """Gradients whose samples are weighed."""

    policy: Policy = "tiny"
    rewards: list[RewardName] = Field(min_length=1)
    families: list[FamilyName] = Field(["counts", "bag"], min_length=1)
    fitted: list[Size] = Field([16], min_length=1)  # completions N that a reward is distilled from
    prompts: Size = 16  # B, of a batch of gradients
    rows: int = Field(6, ge=3)  # batches
    reference: Size = 3  # batches of rloo that the truth of each row is the mean of, its own too
    batches: list[Size] = Field([1, 64], min_length=1)  # batch sizes n at which worth is given


class Name(NamedTuple):
    """What a gradient is of; ``family`` and ``fitted`` (N) of the distilled reward, ``weight`` of the residual."""

    reward: str
    estimator: str
    family: str = ""
    fitted: int = 0
    weight: float = 1.0


@dataclass(frozen=True)
class Rows:
    """Repeated gradients [R, P], `rloo`'s by reward as ``reference``, and the fits by reward, family and N."""

    gradients: dict[Name, Tensor]
    reference: dict[str, Tensor]
    fits: dict[tuple[str, str, int], Fit] = field(default_factory=dict)


class Batches:
    """Random batches of prompts after those that rewards are distilled on, and their gradients, all from one graph."""

    @torch.no_grad()
    def __init__(self, subject: Subject, sizes: Gradients) -> None:
        self.subject, self.sizes = subject, sizes
        fitted = sorted(sizes.fitted)
        used = fitted[-1] // GROUP
        if len(subject.prompts) < used + sizes.prompts:
            raise InputError("prompts", len(subject.prompts), f"at least {used + sizes.prompts}: fits and a row")
        self.prompts = subject.prompts[slice(used, None)]
        self.learner = subject.learner(distil_families=sizes.families)
        self.fits: dict[tuple[str, str, int], Fit] = {}
        rewards, features, seen = scored_completions(subject, self.learner.families, fitted[-1])
        tokens = torch.cat([part.tokens for part in seen])
        for reward, scores in rewards.items():
            for name, family in self.learner.families.items():
                store = Store({name: family}, GROUP, fitted[-1])
                for before, n in zip([0, *fitted], fitted, strict=False):
                    store.add({name: features[name][before:n]}, scores[before:n], tokens[before:n])
                    if (fit := store.fit(0)) is not None:
                        self.fits[reward, name, n] = fit

    def draw(self, generator: torch.Generator, alone: bool = False) -> Iterator[tuple[Name, Tensor]]:
        """Names and ascent directions [P] of one batch; ``alone``: of `rloo` only."""
        subject, backbone = self.subject, self.subject.backbone
        objectives = {name: Objective(reward, 0.0) for name, reward in subject.rewards.items()}
        chosen = torch.randperm(len(self.prompts), generator=generator, device=generator.device)[: self.sizes.prompts]
        first = next(iter(objectives))
        sample = self.learner.scored(self.learner.sample(self.prompts[chosen], generator), objectives[first])
        seen, lengths = sample.seen, dict(max_new_tokens=subject.length, min_new_tokens=subject.min_length)
        st = RelaxationConfig(estimator="st", **lengths)
        graph = ReplayGraph(backbone, condition(backbone, seen.prompts, seen.ids, seen.mask, st, generator))

        def parts(fit: Fit | None) -> list[Tensor]:
            """Plug-in and residual [P]."""
            hidden = graph.h.detach().requires_grad_()
            return [graph.parameter_gradient(part) for part in fitted_ascent(self.learner, sample, fit, hidden)]

        pulls = {}
        if not alone and any(reward in DIFFERENTIABLE for reward in objectives):
            ste = RelaxationConfig(estimator="ste", tau=2.0, **lengths)
            pulls["st"] = graph.pullback(graph.rollout, st), 0
            pulls["ste_tau2_hops1"] = graph.pullback(graph.given(ste, generator), ste), 1
        for reward, objective in objectives.items():
            if reward != first:
                scores = objective.score(backbone, seen.prompts, seen.ids, seen.mask).detach()
                sample = replace(sample, reward=scores)
            yield Name(reward, "rloo"), parts(None)[1]
            if alone:
                continue
            for (of, family, n), fit in self.fits.items():
                if of == reward:
                    plug, residual = parts(fit)
                    yield Name(reward, "plugin", family, n, 0.0), plug
                    for weight in WEIGHTS:
                        yield Name(reward, "corrected", family, n, weight), plug + weight * residual
            if reward in DIFFERENTIABLE:
                _, r, _ = graph.reward(objective)
                for estimator, (pull, hops) in pulls.items():
                    v, _, _ = graph.adjoint(r, 0.0, pull, hops)
                    yield Name(reward, estimator), -graph.parameter_gradient(v)


def gradient_rows(subject: Subject, sizes: Gradients) -> Rows:
    """R batches of gradients, through a sketch of `SKETCH` numbers."""
    batches = Batches(subject, sizes)
    project = sketch(sum(p.numel() for p in subject.backbone.trainable_parameters()), SKETCH)
    gradients, reference = defaultdict(list), defaultdict(list)
    for row in progress(range(sizes.rows), "batches of gradients"):
        generator = torch.Generator(subject.backbone.device).manual_seed(SEED + row)
        total = dict.fromkeys(subject.rewards, 0.0)
        for batch in range(sizes.reference):
            for name, gradient in batches.draw(generator, alone=batch > 0):
                kept = project(gradient.cpu())
                if batch == 0:
                    gradients[name].append(kept)
                if name.estimator == "rloo":
                    total[name.reward] = total[name.reward] + kept
        for reward, value in total.items():
            reference[reward].append(value / sizes.reference)
    stacked = ({name: torch.stack(parts) for name, parts in each.items()} for each in (gradients, reference))
    return Rows(*stacked, batches.fits)


def worth_table(subject: Subject, sizes: Gradients, rows: Rows) -> pd.DataFrame:
    """What one sample of each estimator is worth, in samples of `rloo`: a row per gradient and n.

    ``cosine`` is expected at n, ``cosine_mean`` that of the estimator's mean with the truth. A gradient of zeros, from
    a fit that explains nothing, is worth 0.
    """
    size, table = sizes.prompts * GROUP, []
    for name, gradients in rows.gradients.items():
        reference, count = rows.reference[name.reward], len(gradients)
        truth, own = moments(reference, reference, sizes.reference * size), moments(gradients, reference, size)
        fit = rows.fits.get((name.reward, name.family, name.fitted))
        r2, slope = (fit.choice.r2, fit.choice.slope) if fit else (math.nan, math.nan)
        for n in sizes.batches:
            value = worth_interval(own, truth, n) if gradients.any() else Interval(0.0)
            table.append(dict(policy=subject.policy, stage=subject.stage) | name._asdict() | dict(
                r2=r2, slope=slope, n=n, worth=value.value, low=value.low, high=value.high, cosine=own.cosine(n)[0],
                cosine_mean=own.cosine(math.inf)[0], rloo_cosine=truth.cosine(n)[0], completions=count * size,
                reference=count * sizes.reference * size,
            ))  # fmt: skip
    return pd.DataFrame(table)
