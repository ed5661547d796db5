"""What a fit explains, which tokens it says a reward likes, and what it costs in a training step.

Completions of a policy are scored by every reward, and every family is fitted on the first n of them. A prompt's
completions are predicted by the fit without them (`grade.gradients.distilled.ridge.left_out`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.any_reward.measure.rewards import BATCH_ROWS, Subject, sample_scored
from grade.gradients.distilled.families import Family, Observed, layers_of, make_family
from grade.gradients.distilled.learner import Sample
from grade.gradients.distilled.ridge import Choice, Spectrum, centred, choose, left_out
from grade.gradients.distilled.store import LARGE, Store
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.models.scoring import completion_states
from grade.stats import jackknife_stderr
from grade.training.logs import token_table

SCORE_ROWS = 64
"""Completions whose features are made at once."""
DEPTHS = (1, 2, 4, 8)
"""Layers of the trunk families below all layers, where the base has more."""
COST_STEPS = 3
"""Real steps that are timed."""
NOISE = 0.1
"""Of the features that fill a store, in standard deviations: rows that are drawn twice differ."""


def family_names(layers: int) -> list[str]:
    """Every family of a base with so many layers.

    >>> family_names(4)
    ['counts', 'bag', 'ngrams', 'values', 'trunk1', 'trunk2', 'trunk']
    """
    return ["counts", "bag", "ngrams", "values", *(f"trunk{d}" for d in DEPTHS if d < layers), "trunk"]


def scored_completions(
    subject: Subject, families: Mapping[str, Family], n: int, seed: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Observed]]:
    """Completions of the first n / G prompts.

    Returns:
        Rewards [n] by name, features of each family [n, ...], and the completions in parts of `SCORE_ROWS`.
    """
    backbone, group = subject.backbone, subject.group
    first, *others = subject.rewards
    ids, mask, reward = sample_scored(subject, first, n, torch.Generator(backbone.device).manual_seed(seed))
    prompts = subject.prompts[slice(0, n // group)].repeat(group)
    depths = sorted({family.depth for family in families.values() if family.depth is not None})
    seen, rows = [], {name: [] for name in families}
    rewards: dict[str, list[Tensor]] = {first: [reward]} | {name: [] for name in others}
    for part in (slice(start, start + SCORE_ROWS) for start in range(0, n, SCORE_ROWS)):
        own = prompts[part], ids[part], mask[part]
        seen.append(Observed(*own, completion_states(backbone, *own, depths)))
        for name in others:
            rewards[name].append(Objective(subject.rewards[name], 0.0).score(backbone, *own).detach().float())
        for name, family in families.items():
            rows[name].append(family.rows(seen[-1]))
    return ({name: torch.cat(parts) for name, parts in rewards.items()},
            {name: torch.cat(parts) for name, parts in rows.items()}, seen)  # fmt: skip


def own_tokens(seen: Sequence[Observed]) -> Tensor:
    """Tokens [n, T] of completions in parts, -1 where masked."""
    return torch.cat([torch.where(part.mask.bool(), part.ids, -1) for part in seen])


@torch.no_grad()
def explained_table(subject: Subject, sizes: Sequence[int], families: Sequence[str] = ()) -> pd.DataFrame:
    """R2 of every reward, family (default: all) and number of completions n; the smaller are the first of the larger.

    Columns policy, stage, reward, family, n; r2 within prompts, out of sample, with its standard error (jackknife over
    prompts, predictions held); slope of the reward on its prediction; penalty that was chosen. NaN for a reward that
    never differs within a prompt.
    """
    names = families or family_names(layers_of(subject.backbone))
    made = {name: make_family(name, subject.backbone) for name in names}
    rewards, rows, seen = scored_completions(subject, made, max(sizes))
    tokens, table = own_tokens(seen), []
    for name, family in made.items():
        store = Store({name: family}, subject.group, max(sizes))
        store.add({name: rows[name]}, next(iter(rewards.values())), tokens)  # the Gram matrix is the same for all
        for n in sizes:
            spectrum = Spectrum.of(store.grams[name][:n, :n])
            for reward, values in rewards.items():
                choice, stderr = explained(spectrum, centred(values[:n].double().cpu(), subject.group), subject.group)
                table.append(dict(
                    policy=subject.policy, stage=subject.stage, reward=reward, family=name, n=n, r2=choice.r2,
                    r2_stderr=stderr, slope=choice.raw_slope, penalty=choice.penalty,
                ))  # fmt: skip
    return pd.DataFrame(table)


def explained(spectrum: Spectrum, rewards: Tensor, group: int) -> tuple[Choice, float]:
    """The best penalty for centred rewards [n], and the jackknife error over groups of its R2, predictions held."""
    choice = choose(spectrum, rewards, group)
    if not float(rewards @ rewards) > 0 or not spectrum.scale > 0:
        return Choice(choice.penalty, math.nan, math.nan, math.nan), math.nan
    predicted = left_out(spectrum, rewards, group, choice.penalty * spectrum.scale)
    sums = torch.stack([predicted * rewards, predicted * predicted, rewards * rewards]).view(3, -1, group).sum(2)
    py, pp, yy = sums.sum(1, keepdim=True) - sums  # [n / G] each, one group left out
    return choice, jackknife_stderr(py.abs() * py / (pp * yy))


def liked_tokens(subject: Subject, completions: int) -> pd.DataFrame:
    """Tokens that the first reward likes most and least, distilled from the policy's completions.

    Columns policy, reward, and those of `grade.training.logs.token_table`; tokens are Python literals.
    """
    (name, reward), learner = next(iter(subject.rewards.items())), subject.learner(residual_weight="auto")
    generator = torch.Generator(subject.backbone.device).manual_seed(0)
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


def fit_cost(subject: Subject, batch: int, completions: int) -> pd.DataFrame:
    """Time the fits of the method `auto` with a store of so many completions, and whole steps of ``batch`` beside them.

    A step learns what its completions scored; that it only sometimes fits, and rarely chooses a family, is what makes
    it cheap. So learning is timed over as many batches as lie between two choices, and all else in a step over a few
    real ones, of which the first is not timed. The store is filled with features and rewards of one batch, drawn again
    and again with some noise, and so are the batches: their sizes are those of real ones, and nothing else about them
    takes time.

    Columns policy, batch, completions (in the store after it), fitted, chosen (whether family and penalty were chosen
    anew), fit_seconds (adding, predicting, fitting), step_seconds (these, and the mean of all else but the
    optimizer's).
    """
    learner, objective = subject.learner(residual_weight="auto"), Objective(next(iter(subject.rewards.values())))
    generator = torch.Generator(subject.backbone.device).manual_seed(0)
    prompts, context = batch // subject.group, StepContext(1, apply=lambda: None)
    sample = learner.scored(learner.sample(subject.prompts[slice(0, prompts)], generator), objective)
    noise = torch.Generator().manual_seed(0)
    for _ in range(math.ceil(completions / batch)):
        filled = _drawn_again(sample, batch, noise)
        learner.store.add(filled.rows, filled.reward, own_tokens([filled.seen]))
    rest = []
    for step in range(COST_STEPS + 1):
        own = subject.prompts[torch.arange(step * prompts, (step + 1) * prompts) % len(subject.prompts)]
        start = time.perf_counter()
        learner.step([(own, generator)], objective, context)
        rest.append(time.perf_counter() - start - float(learner.figures["distilled/seconds"][0]))
        for p in subject.backbone.trainable_parameters():
            p.grad = None
    table = []
    for _ in range(math.ceil(LARGE / batch)):
        drawn = _drawn_again(sample, batch, noise)
        start, choices = time.perf_counter(), learner.store.choices
        learner.update_fit([drawn], context)
        seconds, fitted = time.perf_counter() - start, learner.store.waiting == []
        table.append(dict(policy=subject.policy, batch=batch, completions=len(learner.store), fitted=fitted,
                          chosen=learner.store.choices is not choices, fit_seconds=seconds,
                          step_seconds=seconds + statistics.fmean(rest[1:])))  # fmt: skip
    return pd.DataFrame(table)


def _drawn_again(sample: Sample, n: int, generator: torch.Generator) -> Sample:
    """N of a batch's completions with random rewards and some noise in their features."""
    drawn = torch.randint(len(sample.reward), (n,), generator=generator)
    rows = {}
    for name, values in sample.rows.items():
        rows[name] = values[drawn.to(values.device)]
        if values.is_floating_point():
            noise = torch.randn(rows[name].shape, generator=generator, dtype=values.dtype)
            rows[name] = rows[name] + NOISE * float(values.std()) * noise.to(values.device)
    return Sample(sample.seen[drawn], torch.randn(n, generator=generator), rows)
