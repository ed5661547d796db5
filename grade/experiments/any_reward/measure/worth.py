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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from grade.errors import InputError
from grade.experiments.any_reward.measure.explained import own_tokens, scored_completions
from grade.experiments.any_reward.measure.parts import fitted_ascent
from grade.experiments.any_reward.measure.rewards import Subject
from grade.experiments.measured import progress
from grade.experiments.moments import moments, sketch, worth_interval
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.store import Fit, Store
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.losses import gae, token_rewards
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import condition
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.models.scoring import score_hidden
from grade.stats import Interval

SKETCH = 2**15
"""Numbers that are kept of a gradient."""
GAE_LAMBDA = 0.95
VALUE_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
"""Ridge penalties of the value, in units of the features' mean square."""
STE = RelaxationConfig(estimator="ste", tau=2.0)
STE_HOPS = 1


class Name(NamedTuple):
    """What a gradient is of.

    Attributes:
        reward: Name.
        estimator: ``rloo``, ``ppo``, ``st``, ``ste_tau2_hops1``, ``plugin`` or ``corrected``.
        family: Of the distilled reward; empty without one.
        fitted: N completions of the fit; 0 without one.
        weight: Of the residual.
    """

    reward: str
    estimator: str
    family: str = ""
    fitted: int = 0
    weight: float = 1.0


@dataclass(frozen=True)
class Setting:
    """What gradients are taken of.

    Attributes:
        subject: Policy, fixed, with rewards and prompts. The first prompts are those of the fits.
        batch: Prompts B of a row.
        families: Names.
        fitted: Sizes N of the fits, multiples of G.
        weights: Of the residual.
        differentiable: Rewards through which `st` and `ste` go.
    """

    subject: Subject
    batch: int
    families: Sequence[str]
    fitted: Sequence[int]
    weights: Sequence[float] = (0.3, 1.0)
    differentiable: Sequence[str] = ()

    @property
    def config(self) -> MethodConfig:
        """Settings of the learner whose losses are used."""
        return MethodConfig(
            method="distilled", num_generations=self.subject.group, max_completion_length=self.subject.length,
            min_completion_length=self.subject.min_length, distil_families=list(self.families),
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Completions of a row."""
        return self.batch * self.subject.group

    @property
    def prompts(self) -> PromptBatch:
        """Prompts of the gradients: none that a fit has seen."""
        used = max(self.fitted) // self.subject.group
        if len(self.subject.prompts) < used + self.batch:
            raise InputError("prompts", len(self.subject.prompts), f"at least {used + self.batch}: fits and a row")
        return self.subject.prompts[slice(used, None)]


@dataclass(frozen=True)
class Rows:
    """Repeated gradients.

    Attributes:
        gradients: [R, P] each.
        reference: `rloo` by reward [R, P], each row the mean of ``reference_size`` completions.
        size: Completions of a row.
        reference_size: Completions of a row of the reference.
        fits: The distilled rewards by reward, family and N.
        policy: Name.
        stage: ``untrained`` or ``trained``.
    """

    gradients: dict[Name, Tensor]
    reference: dict[str, Tensor]
    size: int
    reference_size: int
    fits: dict[tuple[str, str, int], Fit] = field(default_factory=dict)
    policy: str = ""
    stage: str = ""


@torch.no_grad()
def fitted_rewards(
    setting: Setting, learner: DistilledGradient, seed: int
) -> tuple[dict[tuple[str, str, int], Fit], dict[tuple[str, int], Tensor]]:
    """Distil every reward from completions of the first prompts, and fit its value function.

    Returns:
        Fits by reward, family and N, and weights [D + 1] of values by reward and N.
    """
    most, group = max(setting.fitted), setting.subject.group
    rewards, features, seen = scored_completions(setting.subject, learner.families, most, seed)
    tokens = own_tokens(seen)
    states = torch.cat([part.states.predicting for part in seen])
    mask = torch.cat([part.mask for part in seen])
    fits: dict[tuple[str, str, int], Fit] = {}
    values: dict[tuple[str, int], Tensor] = {}
    for reward, scores in rewards.items():
        for name, family in learner.families.items():
            store, before = Store({name: family}, group, most), 0
            for n in sorted(setting.fitted):
                store.add({name: features[name][before:n]}, scores[before:n], tokens[before:n])
                fit, before = store.fit(0), n
                if fit is not None:
                    fits[reward, name, n] = fit
        values |= {(reward, n): value_weights(states[:n], mask[:n], scores[:n]) for n in setting.fitted}
    return fits, values


def value_weights(states: Tensor, mask: Tensor, rewards: Tensor) -> Tensor:
    """Ridge regression of rewards on the states before each token: a value function in closed form.

    The penalty is chosen on the last quarter of the completions.

    Returns:
        Weights [D + 1] for `state_features`.
    """
    x, valid = state_features(states).double(), mask.bool()
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


def state_features(states: Tensor) -> Tensor:
    """Normalised states and a constant [..., D + 1]."""
    states = states.to(wide(states.dtype))
    return torch.cat([F.layer_norm(states, states.shape[-1:]), states.new_ones(*states.shape[:-1], 1)], -1)


def gradient_rows(setting: Setting, rows: int, reference_batches: int, seed: int = 0) -> Rows:
    """Draw R rows.

    Returns:
        The gradients, through a sketch of `SKETCH` numbers, and the fits.
    """
    subject = setting.subject
    learner = DistilledGradient(setting.config, subject.backbone)
    fits, values = fitted_rewards(setting, learner, seed)
    project = sketch(sum(p.numel() for p in subject.backbone.trainable_parameters()), SKETCH)
    found: dict[Name, list[Tensor]] = {}
    reference: dict[str, list[Tensor]] = {name: [] for name in subject.rewards}
    for row in progress(range(rows), "batches of gradients"):
        generator = torch.Generator(subject.backbone.device).manual_seed(1_000_003 * (seed + 1) + row)
        total = dict.fromkeys(subject.rewards, 0.0)
        for name, gradient in _row(setting, learner, fits, values, generator):
            found.setdefault(name, []).append(kept := project(gradient.cpu()))
            if name.estimator == "rloo":
                total[name.reward] = total[name.reward] + kept
        for _ in range(reference_batches - 1):
            for name, gradient in _row(setting, learner, {}, {}, generator, alone=True):
                total[name.reward] = total[name.reward] + project(gradient.cpu())
        for name, value in total.items():
            reference[name].append(value / reference_batches)
    return Rows(
        {name: torch.stack(parts) for name, parts in found.items()},
        {name: torch.stack(parts) for name, parts in reference.items()},
        setting.size, reference_batches * setting.size, fits, subject.policy, subject.stage,
    )  # fmt: skip


def worth_table(rows: Rows, batches: Sequence[int]) -> pd.DataFrame:
    """What one sample of each estimator is worth, in samples of `rloo`.

    Returns:
        One row per gradient and n. Columns policy, stage; reward, estimator, family, fitted (N), weight (of the
        residual); r2 and slope of the fit (NaN without one; r2 out of sample, within prompts); n; worth with low and
        high (95 %; None: no interval), cosine (expected, at n), cosine_mean (of the estimator's mean with the truth),
        rloo_cosine (of `rloo` at n), completions (all of the estimator), reference (all of the truth). A gradient of
        zeros, from a fit that explains nothing, is worth 0.
    """
    truths = {name: moments(r, r, rows.reference_size) for name, r in rows.reference.items()}
    table = []
    for name, gradients in rows.gradients.items():
        truth, count = truths[name.reward], len(gradients)
        m = moments(gradients, rows.reference[name.reward], rows.size)
        fit = rows.fits.get((name.reward, name.family, name.fitted))
        r2, slope = (fit.choice.r2, fit.choice.slope) if fit else (math.nan, math.nan)
        for n in batches:
            value = worth_interval(m, truth, n) if gradients.any() else Interval(0.0, None, None, None, count)
            table.append(dict(policy=rows.policy, stage=rows.stage) | name._asdict() | dict(
                r2=r2, slope=slope, n=n, worth=value.value, low=value.low, high=value.high, cosine=m.cosine(n)[0],
                cosine_mean=m.cosine(math.inf)[0], rloo_cosine=truth.cosine(n)[0], completions=count * rows.size,
                reference=count * rows.reference_size,
            ))  # fmt: skip
    return pd.DataFrame(table)


def _row(
    setting: Setting, learner: DistilledGradient, fits: Mapping[tuple[str, str, int], Fit],
    values: Mapping[tuple[str, int], Tensor], generator: torch.Generator, alone: bool = False,
) -> Iterator[tuple[Name, Tensor]]:  # fmt: skip
    """Names and gradients [P] of one batch; ``alone``: `rloo` only."""
    subject, prompts = setting.subject, setting.prompts
    chosen = torch.randperm(len(prompts), generator=generator, device=generator.device)[: setting.batch]
    first, *_ = subject.rewards
    sample = learner.scored(learner.sample(prompts[chosen], generator), Objective(subject.rewards[first], 0.0))
    seen = sample.seen
    st = RelaxationConfig(estimator="st", max_new_tokens=subject.length, min_new_tokens=subject.min_length)
    graph = ReplayGraph(subject.backbone, condition(subject.backbone, seen.prompts, seen.ids, seen.mask, st, generator))
    pulls = {}
    if setting.differentiable and not alone:
        ste = STE.model_copy(update=dict(max_new_tokens=subject.length, min_new_tokens=subject.min_length))
        pulls["st"] = graph.pullback(graph.rollout, st), 0
        pulls[f"ste_tau{STE.tau:g}_hops{STE_HOPS}"] = graph.pullback(graph.given(ste, generator), ste), STE_HOPS
    for reward, model in subject.rewards.items():
        objective = Objective(model, 0.0)
        if reward != first:
            scores = objective.score(subject.backbone, seen.prompts, seen.ids, seen.mask).detach()
            sample = replace(sample, reward=scores)
        yield Name(reward, "rloo"), (rloo := _ascent(graph, learner, sample, None)[1])
        if alone:
            continue
        for (of, n), weights in values.items():
            if of == reward:
                yield Name(reward, "ppo", "values_of_states", n), _ppo(subject, graph, sample, weights)
        for (of, family, n), fit in fits.items():
            if of == reward:
                yield from _distilled(setting, Name(reward, "", family, n), _ascent(graph, learner, sample, fit), rloo)
        if reward in setting.differentiable:
            _, r, _ = graph.reward(objective)
            for estimator, (pull, hops) in pulls.items():
                v, _, _ = graph.adjoint(r, 0.0, pull, hops)
                yield Name(reward, estimator), -graph.parameter_gradient(v)


def _distilled(
    setting: Setting, name: Name, parts: tuple[Tensor, Tensor], rloo: Tensor
) -> Iterator[tuple[Name, Tensor]]:
    plug, residual = parts
    yield name._replace(estimator="plugin", weight=0.0), plug
    for weight in setting.weights:
        yield name._replace(estimator="corrected", weight=weight), plug + weight * residual


def _ascent(graph: ReplayGraph, learner: DistilledGradient, sample: Sample, fit: Fit | None) -> tuple[Tensor, Tensor]:
    """Ascent directions [P] of plug-in and residual."""
    leaf = graph.h.detach().requires_grad_()
    plug, residual = fitted_ascent(learner, sample, fit, leaf)
    return graph.parameter_gradient(plug), graph.parameter_gradient(residual)


def _ppo(subject: Subject, graph: ReplayGraph, sample: Sample, weights: Tensor) -> Tensor:
    """Gradient [P] with generalised advantages, not whitened: that would only scale a batch."""
    seen = sample.seen
    values = (state_features(seen.states.predicting) @ weights) * seen.mask
    reward = token_rewards(sample.reward, torch.zeros_like(values), seen.mask, 0.0).to(values.dtype)
    advantages, _ = gae(reward, values, seen.mask, 1.0, GAE_LAMBDA)
    leaf = graph.h.detach().requires_grad_()
    with torch.enable_grad():
        logps = score_hidden(subject.backbone, leaf, seen.ids, seen.mask, ("logps",), 1.0, subject.min_length).logps
        v = torch.autograd.grad((advantages.detach() * logps).sum(1).mean(), leaf)[0]
    return graph.parameter_gradient(v)
