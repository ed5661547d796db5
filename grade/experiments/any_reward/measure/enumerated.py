"""Gradients of distilled rewards where every completion can be enumerated: bias and variance without sampling noise.

In float64, on the tiny random GPT-2 of `grade.experiments.enumeration`. A reward is a table: one number for each prompt
and completion, of which a share adds up over tokens. The losses are the learner's own (`explained.ascent`). Their
gradient with respect to hidden states, times the Jacobian of each completion's states, is each completion's gradient,
so expectations over all groups of two completions (every pair, with its probability) are sums: the leave-one-out
baseline is enumerated as well.

The Monte-Carlo test draws completions with the learner's sampler, in groups of four, and holds the mean gradient along
fixed directions against the exact one. It also covers a whole step, in which the critic is fitted on the step's own
completions.
"""

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from grade.experiments.any_reward.measure.explained import ascent, fitted_ascent
from grade.experiments.enumeration import completion_logps, every_completion, random_prompts, tiny_policy
from grade.gradients.distilled.families import ADDITIVE, Observed, make_family
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.ridge import Choice
from grade.gradients.distilled.store import Fit, Store
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.models.backbone import Backbone
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden
from grade.results import progress
from grade.rewards.base import Reward

FAMILIES = (*ADDITIVE, "trunk")
BATCH, LENGTH = 2, 2
"""Prompts B, and tokens T of a completion at most."""
GROUP = 4
"""Completions of a prompt; the enumeration takes pairs."""
STEPS = ("first step", "second step", "earlier choice")
"""Whole steps of the method, each group's critic fitted on the other groups. In the first nothing was chosen before it,
so it uses no values; in the second family, penalty and slope are those of the first. The last is the second without
what else a step does."""
_CHUNK = 512
"""Completions whose Jacobians are gathered at once."""


class World(Reward):
    """The tiny policy, all N completions of its B prompts, and a random reward of which a share adds up over tokens.

    ``truth`` is the gradient [P] of ``mean over prompts of sum_y pi(y) R(y)``.
    """

    name = "table"

    def __init__(self, additive: float = 0.5) -> None:
        self.backbone = policy = tiny_policy()
        self.prompts = prompts = random_prompts(policy, BATCH)
        ids, mask = every_completion(policy.vocab_size, LENGTH, policy.eos_token_ids)
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(policy.vocab_size, generator=generator, dtype=torch.float64)
        sums = (values[ids] * mask).sum(1).expand(BATCH, -1)
        table = torch.randn(BATCH, len(ids), generator=generator, dtype=torch.float64)
        self.rewards = sum(share**0.5 * (part - part.mean()) / part.std() for share, part in
                           ((additive, sums), (1 - additive, table)))  # fmt: skip
        logps, parameters = completion_logps(policy, prompts, LENGTH), policy.trainable_parameters()
        self.truth = flatten(torch.autograd.grad((logps.exp() * self.rewards).sum(1).mean(), parameters))
        self.probabilities = logps.detach().exp()  # [B, N], as rewards
        many = prompts.repeat(len(ids)), ids.repeat(BATCH, 1), mask.repeat(BATCH, 1)
        # All B N completions of all prompts, prompt by prompt.
        self.seen = Observed.of(policy, [make_family("trunk", policy)], *many)
        rows = []
        for row in range(len(self.seen.ids)):
            one = self.seen[slice(row, row + 1)]
            h = predicting_hidden(policy, one.prompts, one.ids).flatten()
            rows.append(torch.stack([flatten(torch.autograd.grad(x, parameters, retain_graph=True)) for x in h]))
        self.jacobian = torch.stack(rows)  # of the predicting hidden states by the parameters [B N, T D, P]

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B]."""
        return self.rewards.flatten()[self.find(prompts, ids, mask)]

    def learner(self, group: int = GROUP) -> DistilledGradient:
        """The method with groups of this size."""
        config = MethodConfig(
            method="distilled", num_generations=group, max_completion_length=LENGTH, residual_weight=1.0,
            distil_families=list(FAMILIES),
        )  # fmt: skip
        return DistilledGradient(config, self.backbone)

    def find(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rows of ``seen`` [n] that are these completions [n, T' <= T]."""
        n = self.probabilities.shape[1]
        ids = F.pad(ids * mask, (0, LENGTH - ids.shape[1]))
        every = self.seen.ids[:n] * self.seen.mask[:n]
        prompt, completion = ((a[:, None] == b).all(2).int().argmax(1)
                              for a, b in ((prompts.ids, self.prompts.ids), (ids, every)))  # fmt: skip
        return prompt * n + completion

    def scored(self, prompts: Tensor, completions: Tensor) -> Sample:
        """Completions [n, k] of prompts [n] by their numbers, one after the other, with rewards."""
        rows = (prompts.unsqueeze(1) * self.probabilities.shape[1] + completions).flatten()
        return Sample(self.seen[rows], self.rewards.flatten()[rows], {})

    def drawn(self, learner: DistilledGradient, groups: int, generator: torch.Generator) -> Sample:
        """Groups of completions, of one prompt after the other, with the learner's own sampler."""
        prompts = self.prompts[torch.arange(groups) % BATCH]
        return learner.scored(learner.sample(prompts, generator), Objective(self))

    def fit(self, family: str, n: int, seed: int = 1) -> Fit | None:
        """A reward distilled from n completions with the learner's own store; None if their rewards do not differ."""
        prompts = torch.arange(n // GROUP) % BATCH
        generator, made = torch.Generator().manual_seed(seed), make_family(family, self.backbone)
        drawn = torch.multinomial(self.probabilities[prompts], GROUP, True, generator=generator)
        sample = self.scored(prompts, drawn)
        store = Store({family: made}, GROUP, n)
        store.add({family: made.rows(sample.seen)}, sample.reward, sample.seen.tokens)
        return store.fit(0)

    def r2(self, fit: Fit) -> float:
        """``1 - Var(R - S) / Var(R)`` within prompts under the policy, S the sum of a completion's own values."""
        values = make_family(fit.family, self.backbone).own(fit.all, self.seen).sum(1).view(self.rewards.shape)
        p, both = self.probabilities, (self.rewards - values, self.rewards)
        left, whole = ((p * (x - (p * x).sum(1, keepdim=True)) ** 2).sum() for x in both)
        return float(1 - left / whole)

    def leaf(self, sample: Sample) -> Tensor:
        """The hidden states of completions [n, T, D], to be differentiated."""
        with torch.no_grad():
            return predicting_hidden(self.backbone, sample.seen.prompts, sample.seen.ids).requires_grad_()

    def gradients(self, sample: Sample, states: Tensor, along: Tensor | None = None) -> Tensor:
        """Gradients of completions [n, P], or [n, k] along directions [P, k], from those of their states [n, T, D]."""
        jacobian = self.jacobian if along is None else self.jacobian @ along
        rows = self.find(sample.seen.prompts, sample.seen.ids, sample.seen.mask)
        states = F.pad(states, (0, 0, 0, LENGTH - states.shape[1])).flatten(1)
        chunks = zip(states.split(_CHUNK), rows.split(_CHUNK), strict=True)
        return torch.cat([(v.unsqueeze(1) @ jacobian[at]).squeeze(1) for v, at in chunks])

    def pair_moments(self, fit: Fit | None = None) -> dict[str, tuple[Tensor, Tensor]]:
        """Expectation [P] and variance of one sample (trace, within prompts) of each estimator, over all pairs."""
        n = self.probabilities.shape[1]
        pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n)).repeat(BATCH, 1)
        sample = self.scored(torch.arange(BATCH).repeat_interleave(n * n), pairs)
        plug, residual = (self.gradients(sample, part * len(sample.reward)).view(BATCH, n * n, 2, -1).mean(2)
                          for part in fitted_ascent(self.learner(2), sample, fit, self.leaf(sample)))  # fmt: skip
        p = (self.probabilities.unsqueeze(2) * self.probabilities.unsqueeze(1)).view(BATCH, n * n, 1)
        moments = {}
        for name, weight in ({"plugin": 0.0, "weight0.3": 0.3, "corrected": 1.0} if fit else {"rloo": 1.0}).items():
            gradients = plug + weight * residual
            means = (p * gradients).sum(1, keepdim=True)
            # A group's variance times its two completions: independent samples of one prompt would average to it.
            moments[name] = means.mean((0, 1)), 2 * (p * (gradients - means) ** 2).sum((1, 2)).mean()
        return moments


def _scaled(fit: Fit, factor: float) -> Fit:
    """A fit times a factor, its slope included, which is then 1."""
    return Fit(fit.family, factor * fit.all, Choice(fit.choice.penalty, fit.choice.r2, 1.0, 0.0))


def make_critics(world: World, n: int = 64, best: int = 1024) -> dict[str, Fit]:
    """Useful, useless and harmful critics of every family, as the learner would hold them.

    By name: ``<family> fitted``; ``random``, as large as the best; ``adversarial``, the best times -3; ``huge``, random
    and a thousand times as large; and ``zero``. A fit that explains nothing, whose slope is 0, is left out: the learner
    does not use it. So is a useless `trunk`: its corrected form is `rloo` whatever its weights.
    """
    critics: dict[str, Fit] = {}
    generator = torch.Generator().manual_seed(1)
    for family in FAMILIES:
        small, large = world.fit(family, n), world.fit(family, best, seed=2)
        if small is not None and small.choice.slope > 0:
            critics[f"{family} fitted"] = small
        if large is None or family not in ADDITIVE:
            continue
        noise = torch.randn(large.weights.shape, generator=generator, dtype=large.weights.dtype)
        random = Fit(family, noise / noise.norm() * large.all.norm(), Choice(large.choice.penalty, 0.0, 1.0, 0.0))
        critics |= {f"{family} random": random, f"{family} adversarial": _scaled(large, -3.0),
                    f"{family} huge": _scaled(random, 1000.0), "zero": _scaled(random, 0.0)}  # fmt: skip
    return critics


def exact_table(world: World, critics: Mapping[str, Fit]) -> pd.DataFrame:
    """Exact bias and variance of every estimator with every critic, over all pairs of completions of a prompt.

    A row per critic and estimator (`rloo` once, without critic): r2 (see `World.r2`; NaN without); bias,
    ``|E g - mu| / |mu|``; variance of one sample and mse, bias squared plus variance, both over ``|mu|^2``; cosine of
    the expectation with mu; gain, the variance of `rloo` over this.
    """
    table, norm2 = [], world.truth.square().sum()
    base = world.pair_moments()
    for name, fit in {"none": None, **critics}.items():
        additive = fit is not None and fit.family in ADDITIVE
        about = dict(critic=name, family=fit.family if fit else "", additive=additive,
                     r2=world.r2(fit) if additive else math.nan)  # fmt: skip
        for estimator, (mean, noise) in (world.pair_moments(fit) if fit else base).items():
            bias2 = (mean - world.truth).square().sum() / norm2
            table.append(about | dict(
                estimator=estimator, bias=float(bias2.sqrt()), variance=float(noise / norm2),
                mse=float(bias2 + noise / norm2), gain=float(base["rloo"][1] / noise) if noise > 0 else math.inf,
                cosine=float(F.cosine_similarity(mean, world.truth, 0)),
            ))  # fmt: skip
    return pd.DataFrame(table)


def law_table(
    shares: Sequence[float], scales: Sequence[float], families: Sequence[str] = ADDITIVE, n: int = 1024
) -> pd.DataFrame:
    """The gain in variance of the corrected form over `rloo` against the law ``1 / (1 - R2)``, exact."""
    table = []
    for share in shares:
        world = World(share)
        base = world.pair_moments()["rloo"][1]
        for family in families:
            best = world.fit(family, n)
            for scale in scales:
                fit = _scaled(best, scale)
                noise, r2 = world.pair_moments(fit)["corrected"][1], world.r2(fit)
                table.append(dict(share=share, family=family, scale=scale, r2=r2, gain=float(base / noise),
                                  law=1 / (1 - r2) if r2 < 1 else math.inf))  # fmt: skip
    return pd.DataFrame(table)


def bias_table(
    world: World, critics: Mapping[str, Fit], samples: int, steps: int = 0, step_groups: int = 8
) -> pd.DataFrame:
    """Bias of the corrected form along fixed directions, with the learner's own sampler.

    A row per critic and direction (0: along the truth; the others are random): bias and stderr over ``|mu|``, z, and n
    completions.
    """
    generator, size = torch.Generator().manual_seed(0), world.truth.norm()
    random = torch.randn(len(world.truth), 3, generator=generator, dtype=torch.float64)
    axes = torch.cat([world.truth.unsqueeze(1), random], 1)
    axes = axes / axes.norm(dim=0)
    learner = world.learner()
    sample = world.drawn(learner, samples // GROUP, generator)
    leaf, draws = world.leaf(sample), {}
    for name, fit in {"none": None, **critics}.items():
        plug, residual = fitted_ascent(learner, sample, fit, leaf)
        # The mean over a round of all prompts is one draw of the mean over prompts.
        each = world.gradients(sample, (plug + residual) * samples, axes)
        draws[name] = samples, each.unflatten(0, (-1, GROUP * BATCH)).mean(1)
    for step in STEPS if steps else ():
        each = [_step(world, step, step_groups, axes, generator) for _ in progress(range(steps), step)]
        draws[step] = steps * step_groups * GROUP, torch.stack(each)
    table = []
    for critic, (n, drawn) in draws.items():
        bias, stderr = (drawn.mean(0) - world.truth @ axes) / size, drawn.std(0) / size / len(drawn) ** 0.5
        columns = dict(bias=bias, stderr=stderr, z=bias / stderr)
        columns = {name: values.tolist() for name, values in columns.items()}
        table.append(pd.DataFrame(dict(critic=critic, direction=range(len(bias)), **columns, n=n)))
    return pd.concat(table, ignore_index=True)


def _step(world: World, step: str, groups: int, axes: Tensor, generator: torch.Generator) -> Tensor:
    """Gradient along the axes [k] of one of `STEPS`."""
    learner, context = world.learner(), StepContext(1, apply=lambda: None)
    sample = world.drawn(learner, groups, generator)
    if step != "first step":
        learner.update_fit([world.drawn(learner, groups, generator)], context)
    if step == "earlier choice":
        learner.store.add(sample.rows, sample.reward, sample.seen.tokens)
        learner.fit = learner.store.fit_of(learner.fit.family, groups)
    else:
        learner.update_fit([sample], context)
    plug, residual = ascent(learner, sample, world.leaf(sample))
    return world.gradients(sample, plug + residual, axes).sum(0)
