"""What a fit costs in a training step, and what it teaches: the learner alone, without a training run."""

from __future__ import annotations

import math
import statistics
import time

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.any_reward.measure.explained import own_tokens
from grade.experiments.any_reward.measure.rewards import BATCH_ROWS
from grade.experiments.any_reward.measure.subject import Subject
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.store import LARGE
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.training.logs import token_table

BETA = 0.1
NOISE = 0.1
"""Of the features that fill a store, in standard deviations: rows that are drawn twice differ."""


def fit_cost(subject: Subject, batch: int, completions: int, steps: int, seed: int = 0) -> pd.DataFrame:
    """Time the fits of the method `auto` with a store that is as full, and whole steps beside them.

    A step learns what its completions scored; that it only sometimes fits, and rarely chooses a family, is what makes
    it cheap. So learning is timed over as many batches as lie between two choices, and all else in a step over a few
    real ones, of which the first is not timed. The store is filled with features and rewards of one batch, drawn again
    and again with some noise, and so are the batches: their sizes are those of real ones, and nothing else about them
    takes time.

    Args:
        subject: Policy and reward; the first one counts.
        batch: Completions a step, a multiple of G.
        completions: In the store when the first step begins.
        steps: Timed steps.
        seed: Of the noise.

    Returns:
        One row per batch that is learned. Columns policy, batch, completions (in the store after it), fitted, chosen
        (whether family and penalty were chosen anew), fit_seconds (adding, predicting, fitting), step_seconds (these,
        and the mean of all else but the optimizer's).
    """
    learner, objective = _learner(subject), Objective(next(iter(subject.rewards.values())), BETA)
    generator = torch.Generator(subject.backbone.device).manual_seed(seed)
    prompts, context = batch // subject.group, StepContext(1, apply=lambda: None)
    sample = learner.scored(learner.sample(subject.prompts[slice(0, prompts)], generator), objective)
    _fill(learner, sample, completions, seed)
    rest = []
    for step in range(steps + 1):
        own = subject.prompts[torch.arange(step * prompts, (step + 1) * prompts) % len(subject.prompts)]
        start = time.perf_counter()
        learner.step([(own, generator)], objective, context)
        rest.append(time.perf_counter() - start - float(learner.figures["distilled/seconds"][0]))
        for p in subject.backbone.trainable_parameters():
            p.grad = None
    table, noise = [], torch.Generator().manual_seed(seed)
    for _ in range(math.ceil(LARGE / batch)):
        reward = torch.randn(len(sample.reward), generator=noise)
        rows = {name: _noisy(rows.cpu(), noise).to(rows.device) for name, rows in sample.rows.items()}
        start, choices = time.perf_counter(), learner.store.choices
        learner.update_fit([Sample(sample.seen, reward, rows)], context)
        seconds, fitted = time.perf_counter() - start, learner.store.waiting == []
        table.append(dict(policy=subject.policy, batch=batch, completions=len(learner.store), fitted=fitted,
                          chosen=learner.store.choices is not choices, fit_seconds=seconds,
                          step_seconds=seconds + statistics.fmean(rest[1:])))  # fmt: skip
    return pd.DataFrame(table)


def liked_tokens(subject: Subject, completions: int, seed: int = 0) -> pd.DataFrame:
    """Tokens that a reward likes most and least, distilled from the policy's completions.

    Args:
        subject: Policy and reward; the first one counts.
        completions: That it is distilled from.
        seed: Of the completions.

    Returns:
        Columns policy, reward; rank, token (quoted, as a Python literal), id, value, count as in
        `grade.training.logs.token_table`.
    """
    (name, reward), learner = next(iter(subject.rewards.items())), _learner(subject)
    generator = torch.Generator(subject.backbone.device).manual_seed(seed)
    prompts = min(BATCH_ROWS, completions) // subject.group
    samples = []
    for start in range(0, completions // subject.group, prompts):
        own = subject.prompts[torch.arange(start, start + prompts) % len(subject.prompts)]
        samples.append(learner.scored(learner.sample(own, generator), Objective(reward, 0.0)))
    learner.update_fit(samples, StepContext(1, apply=lambda: None))
    learner.last = samples[-1].seen
    table = token_table(subject.backbone, learner)
    table["token"] = [repr(token) for token in table["token"]]  # spaces can be seen, line ends do no harm
    table.insert(0, "policy", subject.policy)
    table.insert(1, "reward", name)
    return table


def _learner(subject: Subject) -> DistilledGradient:
    config = MethodConfig(
        method="distilled", num_generations=subject.group, max_completion_length=subject.length,
        min_completion_length=subject.min_length, residual_weight="auto",
    )  # fmt: skip
    return DistilledGradient(config, subject.backbone)


def _fill(learner: DistilledGradient, sample: Sample, completions: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = own_tokens([sample.seen]).cpu()
    group, left = learner.config.group, completions // learner.config.group * learner.config.group
    while left > 0:
        n = min(BATCH_ROWS // group * group, left)
        drawn = torch.randint(len(tokens), (n,), generator=generator)
        rows = {name: _noisy(rows.cpu()[drawn], generator).to(rows.device) for name, rows in sample.rows.items()}
        learner.store.add(rows, torch.randn(n, generator=generator), tokens[drawn])
        left -= n


def _noisy(rows: Tensor, generator: torch.Generator) -> Tensor:
    if not rows.is_floating_point():
        return rows
    noise = torch.randn(rows.shape, generator=generator, dtype=rows.dtype)
    return rows + NOISE * float(rows.std()) * noise
