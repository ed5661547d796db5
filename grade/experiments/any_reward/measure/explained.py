"""Fits of a policy's completions: what they explain, which tokens a reward likes, what a fit costs; their gradients.

Completions are scored by every reward, and every family is fitted on the first n of them. A prompt's completions are
predicted by the fit without them (`grade.gradients.distilled.ridge.left_out`).

`grade.gradients.distilled.learner` makes a step of sampling, fitting and losses. To measure gradients (`ascent`),
completions, fits and hidden states come from outside, and the losses end at the hidden states: one graph then serves
many fits.
"""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from torch import Tensor

from grade.errors import InputError
from grade.experiments.rewards import GROUP, Subject
from grade.experiments.training_runs import BATCH_ROWS
from grade.gradients.distilled.families import Family, Observed, layers_of, make_family
from grade.gradients.distilled.learner import DistilledGradient, Sample
from grade.gradients.distilled.ridge import Choice, Spectrum, centred, choose, left_out
from grade.gradients.distilled.store import LARGE, Fit, Store
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.stats import jackknife_stderr
from grade.training.logs import token_table

DEPTHS = (1, 2, 4, 8)
"""Layers of the trunk families below all layers, where the base has more."""
COST_STEPS = 3
"""Real steps that are timed."""
NOISE = 0.1
"""Of the features that fill a store, in standard deviations: rows that are drawn twice differ."""


@torch.no_grad()
def scored_completions(
    subject: Subject, families: Mapping[str, Family], n: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Observed]]:
    """Rewards [n] by name, features by family, and the first n / G prompts' completions in parts of `BATCH_ROWS`."""
    backbone, most = subject.backbone, GROUP * len(subject.prompts)
    if n % GROUP or not 0 < n <= most:
        raise InputError("completions", n, f"a multiple of {GROUP}, up to {most}")
    generator = torch.Generator(backbone.device).manual_seed(0)
    prompts = subject.prompts[slice(n // GROUP)].repeat(GROUP)
    seen, rewards, rows = [], defaultdict(list), defaultdict(list)
    for start in range(0, n, BATCH_ROWS):
        batch = prompts[slice(start, start + BATCH_ROWS)]
        ids, mask = generate(backbone, batch, subject.length, generator, min_new_tokens=subject.min_length,
                             stop_early=False)  # fmt: skip
        seen.append(Observed.of(backbone, families.values(), batch, ids, mask))
        for name, reward in subject.rewards.items():
            rewards[name].append(Objective(reward).score(backbone, batch, ids, mask).float())
        for name, family in families.items():
            rows[name].append(family.rows(seen[-1]))
    return *({name: torch.cat(parts) for name, parts in each.items()} for each in (rewards, rows)), seen


def fitted_ascent(
    learner: DistilledGradient, sample: Sample, fit: Fit | None, hidden: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`ascent` with a reward distilled from other completions; without one the residual is `rloo`'s."""
    groups = len(sample.reward) // learner.config.group
    # The learner takes the fit without a prompt's own completions; of a fit on others, that is the fit itself.
    learner.fit = fit and replace(fit, weights=fit.weights[:1].expand(1 + groups, -1))
    return ascent(learner, sample, hidden)


def ascent(learner: DistilledGradient, sample: Sample, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Ascent directions of plug-in and residual with the learner's own fit, by the hidden states [B, T, D] (a leaf).

    Their sum is unbiased if the family is additive, and `rloo`'s otherwise.
    """
    (*losses, _), _ = learner.losses_from(hidden, sample, 0, Objective(None, 0.0))  # type: ignore[arg-type]
    plug, residual = (
        -torch.autograd.grad(loss, hidden, retain_graph=True)[0] if loss.requires_grad else torch.zeros_like(hidden)
        for loss in losses
    )
    return plug, residual


@torch.no_grad()
def explained_table(subject: Subject, sizes: Sequence[int], families: Sequence[str] = ()) -> pd.DataFrame:
    """R2 of every reward, family (default: all) and number of completions n; the smaller are the first of the larger.

    r2 is within prompts, out of sample, with its standard error (jackknife over prompts, predictions held); NaN for a
    reward that never differs within a prompt.
    """
    depths = [f"trunk{depth}" for depth in DEPTHS if depth < layers_of(subject.backbone)]
    names = families or ["counts", "bag", "ngrams", "values", *depths, "trunk"]
    made = {name: make_family(name, subject.backbone) for name in names}
    rewards, rows, seen = scored_completions(subject, made, max(sizes))
    table, tokens = [], torch.cat([part.tokens for part in seen])
    for name, family in made.items():
        store = Store({name: family}, GROUP, max(sizes))
        store.add({name: rows[name]}, next(iter(rewards.values())), tokens)  # the Gram matrix is one for all
        for n in sizes:
            spectrum = Spectrum.of(store.grams[name][:n, :n])
            for reward, values in rewards.items():
                choice, stderr = explained(spectrum, centred(values[:n].double().cpu(), GROUP), GROUP)
                table.append(dict(
                    policy=subject.policy, stage=subject.stage, reward=reward, family=name, n=n, r2=choice.r2,
                    r2_stderr=stderr,
                ))  # fmt: skip
    return pd.DataFrame(table)


def explained(spectrum: Spectrum, rewards: Tensor, group: int) -> tuple[Choice, float]:
    """The best penalty for centred rewards [n], and the jackknife error over groups of its R2, predictions held."""
    choice = choose(spectrum, rewards, group)
    if not float(rewards @ rewards) > 0 or not spectrum.scale > 0:
        return Choice(choice.penalty, math.nan, math.nan, math.nan), math.nan
    predicted = left_out(spectrum, rewards, group, choice.penalty)
    sums = torch.stack([predicted * rewards, predicted * predicted, rewards * rewards]).view(3, -1, group).sum(2)
    py, pp, yy = sums.sum(1, keepdim=True) - sums  # [n / G] each, one group left out
    return choice, jackknife_stderr(py.abs() * py / (pp * yy))


def liked_tokens(subject: Subject, completions: int) -> pd.DataFrame:
    """Tokens, as Python literals, that the only reward likes most and least, distilled from completions."""
    ((name, reward),) = subject.rewards.items()
    learner, context = subject.learner(residual_weight="auto"), StepContext(1, apply=lambda: None)
    generator = torch.Generator(subject.backbone.device).manual_seed(0)
    prompts = min(BATCH_ROWS, completions) // GROUP
    samples = [learner.scored(learner.sample(_prompts(subject, start, prompts), generator), Objective(reward))
               for start in range(0, completions // GROUP, prompts)]  # fmt: skip
    learner.update_fit(samples, context)
    learner.last = samples[-1].seen
    table = token_table(subject.backbone.tokenizer, learner.liked_tokens(), learner.token_counts())
    table["token"] = [repr(token) for token in table["token"]]  # spaces can be seen, line ends do no harm
    table.insert(0, "policy", subject.policy)
    table.insert(1, "reward", name)
    return table


def fit_cost(subject: Subject, batch: int, completions: int) -> pd.DataFrame:
    """Time the fits of the method `auto` with a store of so many completions, and whole steps of ``batch`` beside them.

    A step learns what its completions scored; that it only sometimes fits, and rarely chooses a family, is what makes
    it cheap. So learning is timed over as many batches as lie between two choices, and all else in a step (but the
    optimizer's) over a few real ones, of which the first is not timed. The store and these batches repeat the
    completions of one batch, with random rewards and some noise in their features: only their sizes take time.
    """
    learner, objective = subject.learner(residual_weight="auto"), Objective(next(iter(subject.rewards.values())))
    generator = torch.Generator(subject.backbone.device).manual_seed(0)
    prompts, context = batch // GROUP, StepContext(1, apply=lambda: None)
    sample = learner.scored(learner.sample(_prompts(subject, 0, prompts), generator), objective)
    noise = torch.Generator().manual_seed(0)
    for _ in range(math.ceil(completions / batch)):
        filled = _drawn_again(sample, batch, noise)
        learner.store.add(filled.rows, filled.reward, filled.seen.tokens)
    rest = []
    for step in range(COST_STEPS + 1):
        start = time.perf_counter()
        learner.step([(_prompts(subject, step * prompts, prompts), generator)], objective, context)
        rest.append(time.perf_counter() - start - float(learner.figures["distilled/seconds"][0]))
        subject.backbone.zero_grad(set_to_none=True)
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


def _prompts(subject: Subject, start: int, n: int) -> PromptBatch:
    """N of the prompts, which repeat."""
    return subject.prompts[torch.arange(start, start + n) % len(subject.prompts)]


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
