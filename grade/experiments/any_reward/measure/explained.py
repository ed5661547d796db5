"""How much of a reward's variance within prompts each family explains, out of sample.

Completions of a policy are scored by every reward, and every family is fitted on the first n of them. A prompt's
completions are predicted by the fit without them (`grade.gradients.distilled.ridge.left_out`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.any_reward.measure.rewards import sample_scored
from grade.experiments.any_reward.measure.subject import Subject
from grade.gradients.distilled.families import Family, Observed, layers_of, make_family
from grade.gradients.distilled.ridge import Choice, Spectrum, centred, choose, left_out
from grade.gradients.distilled.store import Store
from grade.gradients.objective import Objective
from grade.models.scoring import completion_states
from grade.stats import jackknife_stderr

SCORE_ROWS = 64
"""Completions whose features are made at once."""
DEPTHS = (1, 2, 4, 8)
"""Layers of the trunk families below all layers, where the base has more."""


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

    Args:
        subject: Policy, rewards, prompts.
        families: By name.
        n: Completions, a multiple of G.
        seed: Of the noise.

    Returns:
        Rewards [n] by name, features of each family [n, ...], and the completions in parts of `SCORE_ROWS`.

    Raises:
        InputError: If n is no multiple of G, or there are too few prompts.
    """
    backbone, group = subject.backbone, subject.group
    generator = torch.Generator(backbone.device).manual_seed(seed)
    first, *others = subject.rewards
    ids, mask, reward = sample_scored(
        backbone, subject.rewards[first], subject.prompts, group, subject.length, n, generator, subject.min_length
    )
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
def explained_table(
    subject: Subject, sizes: Sequence[int], families: Sequence[str] = (), seed: int = 0
) -> pd.DataFrame:
    """R2 of every reward, family and number of completions.

    Args:
        subject: Policy, rewards, prompts.
        sizes: Numbers of completions n, multiples of G; the smaller are the first of the larger.
        families: Names; default: all.
        seed: Of the completions.

    Returns:
        Columns policy, stage, reward, family, n; r2, the share of the reward's variance within prompts that is
        explained out of sample, with its standard error (jackknife over prompts, predictions held); slope of the reward
        on its prediction; penalty that was chosen; seconds of the choice. NaN for a reward that never differs within a
        prompt.
    """
    names = families or family_names(layers_of(subject.backbone))
    made = {name: make_family(name, subject.backbone) for name in names}
    rewards, rows, seen = scored_completions(subject, made, max(sizes), seed)
    tokens = own_tokens(seen)
    table = []
    for name, family in made.items():
        store = Store({name: family}, subject.group, max(sizes))
        first, *_ = rewards.values()
        store.add({name: rows[name]}, first, tokens)  # the Gram matrix does not depend on rewards
        for n in sizes:
            start = time.perf_counter()
            spectrum, made_in = Spectrum.of(store.grams[name][:n, :n]), time.perf_counter() - start
            for reward, values in rewards.items():
                start = time.perf_counter()
                choice, stderr = explained(spectrum, centred(values[:n].double().cpu(), subject.group), subject.group)
                table.append(dict(
                    policy=subject.policy, stage=subject.stage, reward=reward, family=name, n=n, r2=choice.r2,
                    r2_stderr=stderr, slope=choice.raw_slope, penalty=choice.penalty,
                    seconds=made_in + time.perf_counter() - start,
                ))  # fmt: skip
    return pd.DataFrame(table)


def explained(spectrum: Spectrum, rewards: Tensor, group: int) -> tuple[Choice, float]:
    """The best penalty with its R2, and the standard error of R2.

    Args:
        spectrum: Of the Gram matrix of centred features [n, n].
        rewards: Centred [n].
        group: G.

    Returns:
        The choice; the jackknife over groups of the R2 of given predictions (NaN if there is none).
    """
    choice = choose(spectrum, rewards, group)
    if not float(rewards @ rewards) > 0 or not spectrum.scale > 0:
        return Choice(choice.penalty, float("nan"), float("nan"), float("nan")), float("nan")
    predicted = left_out(spectrum, rewards, group, choice.penalty * spectrum.scale)
    sums = torch.stack([predicted * rewards, predicted * predicted, rewards * rewards]).view(3, -1, group).sum(2)
    py, pp, yy = sums.sum(1, keepdim=True) - sums  # [n / G] each, one group left out
    return choice, jackknife_stderr(py.abs() * py / (pp * yy))
