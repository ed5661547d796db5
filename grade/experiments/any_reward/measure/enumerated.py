"""Gradients of distilled rewards where every completion can be enumerated: bias and variance without sampling noise.

In float64, on the tiny random GPT-2 of `grade.experiments.enumeration`. A reward is a table: one number for each prompt
and completion, of which a share adds up over tokens. The losses are the learner's own (`measure.parts`). Their gradient
with respect to hidden states, times the Jacobian of each completion's states, is each completion's gradient, so
expectations over all groups of two completions (every pair, with its probability) are sums: the leave-one-out baseline
is enumerated as well.

The Monte-Carlo test draws completions with the learner's sampler, in groups of four, and holds the mean gradient along
fixed directions against the exact one. It also covers a whole step, in which the critic is fitted on the step's own
completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pandas as pd
import torch
import torch.nn.functional as F
from scipy.stats import norm
from torch import Tensor

from grade.experiments.any_reward.measure.explained import own_tokens
from grade.experiments.any_reward.measure.parts import ascent, fitted_ascent
from grade.experiments.enumeration import completion_logps, every_completion, random_prompts, tiny_policy
from grade.experiments.measured import progress
from grade.gradients.distilled.families import ADDITIVE, Observed, make_family
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.ridge import Choice
from grade.gradients.distilled.store import Fit, Store
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import completion_states, predicting_hidden
from grade.rewards.base import Reward

FAMILIES = (*ADDITIVE, "trunk")
WEIGHTS = {"rloo": None, "plugin": 0.0, "weight0.3": 0.3, "corrected": 1.0}
"""Estimators by the residual's weight; `rloo` has no critic."""
GROUP = 4
"""Completions of a prompt; the enumeration takes pairs."""
STEPS = {
    "first step": "nothing was chosen before it, so it uses no values",
    "second step": "family, penalty and slope are those of the first",
    "earlier choice": "the same, without what else a step does",
}
"""Whole steps of the method; a group's critic is fitted on the other groups and the earlier step."""
_CHUNK = 512
"""Completions whose Jacobians are gathered at once."""


class TableReward(Reward):
    """A reward of the enumerated completions."""

    name = "table"

    def __init__(self, world: World) -> None:
        self.world = world

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B]."""
        return self.world.rewards[self.world.find(prompts, ids, mask)]


@dataclass(frozen=True)
class World:
    """A policy, all of its completions, and a reward.

    Attributes:
        backbone: The policy.
        prompts: B prompts.
        seen: All completions of all prompts, B N of them, prompt by prompt.
        probabilities: [B, N].
        jacobian: Of the predicting hidden states by the parameters [B N, T D, P].
        rewards: [B, N].
        truth: Gradient [P] of the mean over prompts of the expected reward.
    """

    backbone: Backbone
    prompts: PromptBatch
    seen: Observed
    probabilities: Tensor
    jacobian: Tensor
    rewards: Tensor
    truth: Tensor

    @property
    def length(self) -> int:
        """T."""
        return self.seen.ids.shape[1]

    def learner(self, group: int) -> DistilledGradient:
        """The method with groups of this size."""
        config = MethodConfig(
            method="distilled", num_generations=group, max_completion_length=self.length, residual_weight=1.0,
            distil_families=list(FAMILIES),
        )  # fmt: skip
        return DistilledGradient(config, self.backbone)

    def find(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of prompts and completions [n], of prompts and completions [n, T' <= T]."""
        ids = F.pad(ids * mask, (0, self.length - ids.shape[1]))
        n = self.probabilities.shape[1]
        every = self.seen.ids[:n] * self.seen.mask[:n]
        places = [(a[:, None] == b).all(2).int().argmax(1) for a, b in ((prompts.ids, self.prompts.ids), (ids, every))]
        return places[0], places[1]

    def sample(self, prompts: Tensor, completions: Tensor) -> Sample:
        """Scored completions by their numbers [n]."""
        rows = prompts * self.probabilities.shape[1] + completions
        return Sample(self.seen[rows], self.rewards[prompts, completions], {})

    def gradients(self, sample: Sample, states: Tensor, along: Tensor | None = None) -> Tensor:
        """Gradients of completions [n, P], or [n, k] along directions [P, k], from those of their states [n, T, D]."""
        jacobian = self.jacobian if along is None else self.jacobian @ along
        prompts, completions = self.find(sample.seen.prompts, sample.seen.ids, sample.seen.mask)
        rows = prompts * self.probabilities.shape[1] + completions
        states = F.pad(states, (0, 0, 0, self.length - states.shape[1])).flatten(1)
        chunks = zip(states.split(_CHUNK), rows.split(_CHUNK), strict=True)
        return torch.cat([(v.unsqueeze(1) @ jacobian[at]).squeeze(1) for v, at in chunks])


def make_world(length: int = 2, batch: int = 2, additive: float = 0.5, seed: int = 0) -> World:
    """The tiny policy with a random reward.

    Returns:
        The world; its truth is the gradient of ``mean over prompts of sum_y pi(y) R(y)`` by enumeration.
    """
    policy = tiny_policy()
    prompts = random_prompts(policy, batch)
    ids, mask = every_completion(policy.vocab_size, length, policy.eos_token_ids)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(policy.vocab_size, generator=generator, dtype=torch.float64)
    sums = (values[ids] * mask).sum(1).expand(batch, -1)
    table = torch.randn(batch, len(ids), generator=generator, dtype=torch.float64)
    rewards = sum(share**0.5 * (part - part.mean()) / part.std() for share, part in
                  ((additive, sums), (1 - additive, table)))  # fmt: skip
    logps = completion_logps(policy, prompts, length)
    truth = torch.autograd.grad((logps.exp() * rewards).sum(1).mean(), policy.trainable_parameters())
    many = prompts.repeat(len(ids)), ids.repeat(batch, 1), mask.repeat(batch, 1)
    layers = make_family("trunk", policy).depth
    seen = Observed(*many, completion_states(policy, *many, [layers]))
    return World(policy, prompts, seen, logps.detach().exp(), _jacobian(policy, seen), rewards, flatten(truth))


def fitted(world: World, family: str, n: int, seed: int = 1) -> Fit | None:
    """A reward distilled from n other completions of the policy, with the learner's own store.

    Returns:
        The fit; None if their rewards do not differ.
    """
    prompts = torch.arange(n // GROUP) % len(world.prompts)
    generator = torch.Generator().manual_seed(seed)
    completions = torch.multinomial(world.probabilities[prompts], GROUP, True, generator=generator)
    sample = world.sample(prompts.repeat_interleave(GROUP), completions.flatten())
    made = make_family(family, world.backbone)
    store = Store({family: made}, GROUP, n)
    store.add({family: made.rows(sample.seen)}, sample.reward, own_tokens([sample.seen]))
    return store.fit(0)


def scaled(fit: Fit, factor: float) -> Fit:
    """A fit times a factor, its slope included, which is then 1."""
    return Fit(fit.family, factor * fit.all, Choice(fit.choice.penalty, fit.choice.r2, 1.0, 0.0))


def make_critics(world: World, n: int = 64, best: int = 1024, seed: int = 1) -> dict[str, Fit]:
    """Useful, useless and harmful critics of every family, as the learner would hold them.

    Returns:
        By name: ``<family> fitted``; ``random``, as large as the best; ``adversarial``, the best times -3; ``huge``,
        random and a thousand times as large; and ``zero``. A fit that explains nothing, whose slope is 0, is left out:
        the learner does not use it. So is a useless `trunk`: its corrected form is `rloo` whatever its weights.
    """
    critics: dict[str, Fit] = {}
    generator = torch.Generator().manual_seed(seed)
    for family in FAMILIES:
        small, large = fitted(world, family, n, seed), fitted(world, family, best, seed + 1)
        if small is not None and small.choice.slope > 0:
            critics[f"{family} fitted"] = small
        if large is None or family not in ADDITIVE:
            continue
        noise = torch.randn(large.weights.shape, generator=generator, dtype=large.weights.dtype)
        random = Fit(family, noise / noise.norm() * large.all.norm(), Choice(large.choice.penalty, 0.0, 1.0, 0.0))
        critics |= {f"{family} random": random, f"{family} adversarial": scaled(large, -3.0),
                    f"{family} huge": scaled(random, 1000.0), "zero": scaled(random, 0.0)}  # fmt: skip
    return critics


def critic_r2(world: World, fit: Fit) -> float:
    """``1 - Var(R - S) / Var(R)`` within prompts under the policy, S the sum of a completion's own values, as it is."""
    values = make_family(fit.family, world.backbone).own(fit.all, world.seen).sum(1).view(world.rewards.shape)
    p = world.probabilities

    def variance(x: Tensor) -> Tensor:
        return (p * (x - (p * x).sum(1, keepdim=True)) ** 2).sum()

    return float(1 - variance(world.rewards - values) / variance(world.rewards))


def exact_table(world: World, critics: Mapping[str, Fit]) -> pd.DataFrame:
    """Exact bias and variance of every estimator with every critic, over all pairs of completions of a prompt.

    Returns:
        One row per critic and estimator (`rloo` once, without critic). Columns critic, family, additive, r2 (see
        `critic_r2`; NaN without), estimator; bias, ``|E g - mu| / |mu|``; variance of one sample and mse, bias squared
        plus variance, both over ``|mu|^2``; cosine of the expectation with mu; gain, the variance of `rloo` over this.
    """
    table, base = [], _pair_moments(world, None)["rloo"]
    for name, fit in {"none": None, **critics}.items():
        found = {"rloo": base} if fit is None else _pair_moments(world, fit)
        r2 = critic_r2(world, fit) if fit and fit.family in ADDITIVE else float("nan")
        for estimator, (mean, noise) in found.items():
            norm2 = world.truth.square().sum()
            bias2 = (mean - world.truth).square().sum() / norm2
            table.append(dict(
                critic=name, family=fit.family if fit else "", additive=bool(fit) and fit.family in ADDITIVE, r2=r2,
                estimator=estimator, bias=float(bias2.sqrt()), variance=float(noise / norm2),
                mse=float(bias2 + noise / norm2), gain=float(base[1] / noise) if noise > 0 else float("inf"),
                cosine=float(F.cosine_similarity(mean, world.truth, 0)),
            ))  # fmt: skip
    return pd.DataFrame(table)


def law_table(
    shares: Sequence[float], scales: Sequence[float], families: Sequence[str] = ADDITIVE, length: int = 2,
    n: int = 1024, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """The gain in variance of the corrected form against ``1 / (1 - R2)``, exact.

    Returns:
        Columns share, family, scale, r2, gain (variance of `rloo` over that of the corrected form), law.
    """
    table = []
    for share in shares:
        world = make_world(length, additive=share, seed=seed)
        base = _pair_moments(world, None)["rloo"][1]
        for family in families:
            best = fitted(world, family, n, seed + 1)
            for scale in scales:
                fit = scaled(best, scale)
                noise, r2 = _pair_moments(world, fit)["corrected"][1], critic_r2(world, fit)
                table.append(dict(share=share, family=family, scale=scale, r2=r2, gain=float(base / noise),
                                  law=1 / (1 - r2) if r2 < 1 else float("inf")))  # fmt: skip
    return pd.DataFrame(table)


def bias_table(
    world: World, critics: Mapping[str, Fit], samples: int, steps: int = 0, step_groups: int = 8,
    directions: int = 3, seed: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Bias of the corrected form along fixed directions, with the learner's own sampler.

    Returns:
        One row per critic and direction (0: along the truth). Columns critic, direction, bias and stderr, both over
        ``|mu|``, z, n completions.
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(len(world.truth), directions, generator=generator, dtype=torch.float64)
    axes = torch.cat([world.truth.unsqueeze(1), random], 1)
    axes = axes / axes.norm(dim=0)
    learner, table = world.learner(GROUP), []
    prompts = world.prompts[torch.arange(samples // GROUP) % len(world.prompts)]
    sample = learner.scored(learner.sample(prompts, generator), Objective(TableReward(world), 0.0))
    leaf = _leaf(world, sample)
    for name, fit in {"none": None, **critics}.items():
        plug, residual = fitted_ascent(learner, sample, fit, leaf)
        # The mean over a round of all prompts is one draw of the mean over prompts.
        each = world.gradients(sample, (plug + residual) * samples, axes)
        rounds = each.unflatten(0, (-1, GROUP * len(world.prompts))).mean(1)
        table += _deviations(world, name, rounds, axes, samples)
    for step in STEPS if steps else ():
        drawn = torch.stack([_step(world, step, step_groups, axes, generator) for _ in progress(range(steps), step)])
        table += _deviations(world, step, drawn, axes, steps * step_groups * GROUP)
    return pd.DataFrame(table)


def worst_deviation(table: pd.DataFrame) -> dict[str, float]:
    """The largest deviation of `bias_table`, and how surprising it is.

    Returns:
        worst, in standard errors; tests, how many deviations it is the largest of; p, the probability of one as large
        among so many independent ones (fewer are independent: critics see the same completions).
    """
    worst, tests = float(table.z.abs().max()), len(table)
    return dict(worst=worst, tests=tests, p=float(1 - (1 - 2 * norm.sf(worst)) ** tests))


def _leaf(world: World, sample: Sample) -> Tensor:
    with torch.no_grad():
        hidden = predicting_hidden(world.backbone, sample.seen.prompts, sample.seen.ids)
    return hidden.requires_grad_()


def _jacobian(policy: Backbone, seen: Observed) -> Tensor:
    """[B N, T D, P], one product for each hidden number of each completion."""
    parameters, found = policy.trainable_parameters(), []
    for row in range(len(seen.ids)):
        one = seen[slice(row, row + 1)]
        h = predicting_hidden(policy, one.prompts, one.ids).flatten()
        found.append(torch.stack([flatten(torch.autograd.grad(x, parameters, retain_graph=True)) for x in h]))
    return torch.stack(found)


def _pair_moments(world: World, fit: Fit | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Expectation [P] and variance of one sample (trace, within prompts) of each estimator, over all pairs."""
    batch, n = world.probabilities.shape
    first, second = torch.cartesian_prod(torch.arange(n), torch.arange(n)).repeat(batch, 1).T
    prompts = torch.arange(batch).repeat_interleave(n * n)
    sample = world.sample(prompts.repeat_interleave(2), torch.stack([first, second], 1).flatten())
    leaf = _leaf(world, sample)
    parts = fitted_ascent(world.learner(2), sample, fit, leaf)
    plug, residual = (
        world.gradients(sample, part * len(sample.reward)).view(batch, n * n, 2, -1).mean(2) for part in parts
    )
    p = (world.probabilities.unsqueeze(2) * world.probabilities.unsqueeze(1)).view(batch, n * n, 1)
    found = {}
    for name, weight in WEIGHTS.items():
        if (name == "rloo") != (fit is None):
            continue
        gradients = plug + (1.0 if weight is None else weight) * residual
        means = (p * gradients).sum(1, keepdim=True)
        # A group's variance times its two completions: independent samples of one prompt would average to it.
        found[name] = means.mean((0, 1)), 2 * (p * (gradients - means) ** 2).sum((1, 2)).mean()
    return found


def _step(world: World, step: str, groups: int, axes: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient along the axes [k] of one of `STEPS`, each group's critic fitted without it."""
    learner, context = world.learner(GROUP), SimpleNamespace(gather=lambda parts: parts)
    prompts = world.prompts[torch.arange(groups) % len(world.prompts)]
    objective = Objective(TableReward(world), 0.0)
    sample = learner.scored(learner.sample(prompts, generator), objective)
    if step != "first step":
        learner.update_fit([learner.scored(learner.sample(prompts, generator), objective)], context)  # type: ignore[arg-type]
    if step == "earlier choice":
        learner.store.add(sample.rows, sample.reward, own_tokens([sample.seen]))
        learner.fit = learner.store.fit_of(learner.fit.family, groups)
    else:
        learner.update_fit([sample], context)  # type: ignore[arg-type]
    leaf = _leaf(world, sample)
    plug, residual = ascent(learner, sample, leaf)
    return world.gradients(sample, plug + residual, axes).sum(0)


def _deviations(world: World, critic: str, drawn: Tensor, axes: Tensor, n: int) -> list[dict]:
    """Rows of `bias_table` from independent draws [R, k]."""
    size = world.truth.norm()
    bias, stderr = (drawn.mean(0) - world.truth @ axes) / size, drawn.std(0) / size / len(drawn) ** 0.5
    return [dict(critic=critic, direction=k, bias=float(b), stderr=float(s), z=float(b / s), n=n)
            for k, (b, s) in enumerate(zip(bias, stderr, strict=True))]  # fmt: skip
