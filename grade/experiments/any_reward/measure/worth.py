"""What one sample of a distilled reward's gradient is worth, on a language model at fixed weights.

Rewards are distilled from N completions of other prompts, one family at a time, and the learner's own losses
(`grade.gradients.distilled.learner`) give the plug-in and the residual of fresh completions. From the same graph of the
same completions come `rloo`, the advantages of `ppo` with a value fitted in closed form, and, where the reward is
differentiable, `st` and `ste`.

A row is one batch: G completions of each of B random prompts. All gradients are ascent directions of the same number,
the expected reward over prompts. The truth is the mean of `rloo` over many more completions than the other estimators
get: row i of the reference is the mean of row i's own completions and of further batches, so products of different rows
are still unbiased (`grade.experiments.moments`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.experiments.any_reward.measure.explained import fitted_ascent, scored_completions
from grade.experiments.intervals import Interval
from grade.experiments.moments import moments, sketch, worth_interval
from grade.experiments.rewards import DIFFERENTIABLE, Policy, RewardName, Subject
from grade.gradients.distilled.learner import Sample
from grade.gradients.distilled.store import Fit, Store
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.losses import gae, token_rewards
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import condition
from grade.models.head import wide
from grade.models.scoring import hidden_logps
from grade.results import progress

SKETCH = 2**15
"""Numbers that are kept of a gradient."""
GAE_LAMBDA = 0.95
VALUE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge penalties of the value, in units of the features' mean square."""
WEIGHTS = (0.3, 1.0)
"""Weights of the residual in the corrected form."""


class Gradients(Config):
    """Gradients whose samples are weighed."""

    policy: Policy = Field("tiny", description="policy")
    rewards: list[RewardName] = Field(min_length=1, description="its rewards")
    families: list[str] = Field(["counts", "bag"], min_length=1, description="families")
    fitted: list[int] = Field([16], min_length=1, description="completions N that a reward is distilled from")
    prompts: int = Field(16, ge=1, description="prompts B of a batch of gradients")
    rows: int = Field(6, ge=3, description="batches")
    reference: int = Field(
        3, ge=1, description="batches of rloo that the truth of each row is the mean of, its own too"
    )
    batches: list[int] = Field([1, 64], min_length=1, description="batch sizes n at which worth is given")


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
    """Random batches of prompts that no fit has seen, and the gradients of their completions, all from one graph.

    Rewards are distilled from completions of the first prompts, and value functions are fitted on the same.
    """

    @torch.no_grad()
    def __init__(self, subject: Subject, sizes: Gradients, seed: int = 0) -> None:
        self.subject, self.sizes = subject, sizes
        fitted = sorted(sizes.fitted)
        used = fitted[-1] // subject.group
        if len(subject.prompts) < used + sizes.prompts:
            raise InputError("prompts", len(subject.prompts), f"at least {used + sizes.prompts}: fits and a row")
        self.prompts = subject.prompts[slice(used, None)]
        self.learner = subject.learner(distil_families=sizes.families)
        self.fits: dict[tuple[str, str, int], Fit] = {}
        self.values: dict[tuple[str, int], Tensor] = {}
        rewards, features, seen = scored_completions(subject, self.learner.families, fitted[-1], seed)
        states, mask = torch.cat([part.predicting for part in seen]), torch.cat([part.mask for part in seen])
        tokens = torch.cat([part.tokens for part in seen])
        for reward, scores in rewards.items():
            for name, family in self.learner.families.items():
                store = Store({name: family}, subject.group, fitted[-1])
                for before, n in zip([0, *fitted], fitted, strict=False):
                    store.add({name: features[name][before:n]}, scores[before:n], tokens[before:n])
                    if (fit := store.fit(0)) is not None:
                        self.fits[reward, name, n] = fit
            for n in fitted:
                self.values[reward, n] = _value_weights(states[:n], mask[:n], scores[:n])

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
        pulls = {}
        if not alone and any(reward in DIFFERENTIABLE for reward in objectives):
            ste = RelaxationConfig(estimator="ste", tau=2.0, **lengths)
            pulls["st"] = graph.pullback(graph.rollout, st), 0
            pulls["ste_tau2_hops1"] = graph.pullback(graph.given(ste, generator), ste), 1
        for reward, objective in objectives.items():
            if reward != first:
                scores = objective.score(backbone, seen.prompts, seen.ids, seen.mask).detach()
                sample = replace(sample, reward=scores)
            yield Name(reward, "rloo"), self._parts(graph, sample, None)[1]
            if alone:
                continue
            for n in self.sizes.fitted:
                yield Name(reward, "ppo", "values_of_states", n), self._ppo(graph, sample, self.values[reward, n])
            for (of, family, n), fit in self.fits.items():
                if of == reward:
                    plug, residual = self._parts(graph, sample, fit)
                    yield Name(reward, "plugin", family, n, 0.0), plug
                    for weight in WEIGHTS:
                        yield Name(reward, "corrected", family, n, weight), plug + weight * residual
            if reward in DIFFERENTIABLE:
                _, r, _ = graph.reward(objective)
                for estimator, (pull, hops) in pulls.items():
                    v, _, _ = graph.adjoint(r, 0.0, pull, hops)
                    yield Name(reward, estimator), -graph.parameter_gradient(v)

    def _parts(self, graph: ReplayGraph, sample: Sample, fit: Fit | None) -> list[Tensor]:
        """Plug-in and residual [P]."""
        parts = fitted_ascent(self.learner, sample, fit, graph.h.detach().requires_grad_())
        return [graph.parameter_gradient(part) for part in parts]

    def _ppo(self, graph: ReplayGraph, sample: Sample, weights: Tensor) -> Tensor:
        """With generalised advantages, not whitened: that would only scale a batch."""
        seen = sample.seen
        values = (_state_features(seen.predicting) @ weights) * seen.mask
        reward = token_rewards(sample.reward, torch.zeros_like(values), seen.mask, 0.0).to(values.dtype)
        advantages, _ = gae(reward, values, seen.mask, 1.0, GAE_LAMBDA)
        leaf = graph.h.detach().requires_grad_()
        with torch.enable_grad():
            logps = hidden_logps(self.subject.backbone, leaf, seen.ids, seen.mask, 1.0, self.subject.min_length)
            v = torch.autograd.grad((advantages.detach() * logps).sum(1).mean(), leaf)[0]
        return graph.parameter_gradient(v)


def _value_weights(states: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """A value function in closed form: weights [D + 1] of a ridge regression of rewards on `_state_features`.

    The penalty is chosen on the last quarter of the completions.
    """
    x, valid = _state_features(states).double(), mask.bool()
    y = rewards.double().unsqueeze(1).expand(mask.shape)
    cut = max(1, len(x) * 3 // 4)

    def fit(part: slice, penalty: float) -> Tensor:
        a, b = x[part][valid[part]], y[part][valid[part]]
        shift = penalty * len(a) * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
        shift[-1, -1] = 0.0  # the constant is free
        return torch.linalg.solve(a.T @ a + shift * a[:, :-1].square().mean(), a.T @ b)

    held = slice(cut, None)
    errors = {p: float(((x[held] @ fit(slice(0, cut), p) - y[held])[valid[held]] ** 2).sum()) for p in VALUE_PENALTIES}
    return fit(slice(0, None), min(errors, key=errors.get)).to(wide(states.dtype))


def _state_features(states: Tensor) -> Tensor:
    """Normalised states and a constant [..., D + 1]."""
    states = states.to(wide(states.dtype))
    return torch.cat([F.layer_norm(states, states.shape[-1:]), states.new_ones(*states.shape[:-1], 1)], -1)


def gradient_rows(subject: Subject, sizes: Gradients, seed: int = 0) -> Rows:
    """R batches of gradients, through a sketch of `SKETCH` numbers."""
    batches = Batches(subject, sizes, seed)
    project = sketch(sum(p.numel() for p in subject.backbone.trainable_parameters()), SKETCH)
    gradients, reference = defaultdict(list), defaultdict(list)
    for row in progress(range(sizes.rows), "batches of gradients"):
        generator = torch.Generator(subject.backbone.device).manual_seed(1_000_003 * (seed + 1) + row)
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

    ``fitted`` is N and ``weight`` the residual's; r2 (out of sample, within prompts) and slope are the fit's, NaN
    without one. Interval of 95 %, None without one; ``cosine`` is expected at n, ``cosine_mean`` that of the
    estimator's mean with the truth. A gradient of zeros, from a fit that explains nothing, is worth 0.
    """
    size, table = sizes.prompts * subject.group, []
    for name, gradients in rows.gradients.items():
        reference, count = rows.reference[name.reward], len(gradients)
        truth, own = moments(reference, reference, sizes.reference * size), moments(gradients, reference, size)
        fit = rows.fits.get((name.reward, name.family, name.fitted))
        r2, slope = (fit.choice.r2, fit.choice.slope) if fit else (math.nan, math.nan)
        for n in sizes.batches:
            value = worth_interval(own, truth, n) if gradients.any() else Interval(0.0, None, None, None, count)
            table.append(dict(policy=subject.policy, stage=subject.stage) | name._asdict() | dict(
                r2=r2, slope=slope, n=n, worth=value.value, low=value.low, high=value.high, cosine=own.cosine(n)[0],
                cosine_mean=own.cosine(math.inf)[0], rloo_cosine=truth.cosine(n)[0], completions=count * size,
                reference=count * sizes.reference * size,
            ))  # fmt: skip
    return pd.DataFrame(table)
