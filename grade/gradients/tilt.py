r"""How much reward any policy can have at a KL, and the token bias that comes near it without training.

**The limit.** Among all laws q of a completion y, given a prompt, the one with the largest reward at its
``KL(q || p)`` to the reference p tilts p exponentially,

    q(y)  proportional to  p(y) exp(lambda R(y)),

with one lambda for all prompts (Gibbs' variational principle; for policies Peters, Muelling and Altun 2010). With n
samples of p for each prompt, q has the weights ``w_i = softmax(lambda R)_i``, the reward ``sum_i w_i R_i`` and
``KL = sum_i w_i log(n w_i)``. What a policy gains can so be measured absolutely:

    efficiency = KL that the limit needs for the policy's gain / KL of the policy.

**The token bias.** If a completion's reward is a sum of values of its tokens, ``R(y) = sum_t s(y_t)``, the law that
maximises ``E[s(y_t)] - KL_t / c`` at every position is one vector added to the logits,

    q(v | y_<t)  proportional to  p(v | y_<t) exp(c s(v)).

It is the limit's own law where the normaliser is the same after every prefix, as with independent tokens.

The values s come from a ridge regression of rewards on counts of tokens (`fit_values`), or from one gradient of a
differentiable reward in the embeddings (`gradient_values`); c sets KL. R2 out of sample is the share of the reward
that tokens alone explain: little R2, little gain, but much of it promises none (notebook `limit`).

Left out: values that depend on position or context.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import brentq
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from grade.gradients.objective import Objective
from grade.models.batch import Completions, PromptBatch
from grade.models.head import EmbeddingTable
from grade.models.policy import Policy

LEAST_EFFECTIVE = 8.0
"""Effective samples per prompt below which n samples say nothing about a law."""
PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0)
"""Ridge penalties that are compared. A feature is a count, so they do not depend on the reward's unit."""
RESIDUAL = 1e-4
"""Relative residual at which a ridge regression is solved."""
FOLDS = 5
"""Parts of the data that are predicted from the others."""
BATCH = 64
"""Completions whose reward is differentiated at once."""


class Law(NamedTuple):
    """The best law at one lambda, as n samples per prompt see it."""

    reward: float  # mean over prompts
    kl: float  # in nats per completion, mean over prompts
    stderr: float  # of the reward at this KL, over prompts
    effective: float  # samples per prompt that carry it, mean of 1 / sum_i w_i^2

    @classmethod
    def tilted(cls, rewards: Tensor, strength: float) -> Law:
        """``w = softmax(strength R)`` of rewards [prompts, n]; strength is lambda, in nats per unit of reward.

        Along the limit ``d reward / d KL = 1 / lambda``, so the standard error at a given KL is that of the prompts'
        ``reward - KL / lambda``.

        >>> law = Law.tilted(torch.tensor([[0.0, 1.0]]), math.log(3))       # weights 1/4, 3/4
        >>> [round(x, 6) for x in (law.reward, law.kl, law.effective)]      # KL = (3 log 3 - 4 log 2) / 4
        [0.75, 0.130812, 1.6]
        """
        rewards = rewards.double()
        weights = (strength * rewards).softmax(1)
        reward = (weights * rewards).sum(1)
        kl = torch.xlogy(weights, weights * rewards.shape[1]).sum(1)
        at_equal_kl = reward - kl / strength if strength else reward
        stderr = float(at_equal_kl.std() / len(rewards) ** 0.5) if len(rewards) > 1 else math.nan
        effective = 1 / weights.square().sum(1)
        return cls(float(reward.mean()), float(kl.mean()), stderr, float(effective.mean()))


def limit_at(rewards: Tensor, kl: float) -> Law:
    """The largest reward at a KL in nats per completion, from rewards [prompts, n] of samples of the reference.

    NaN, with a warning, where fewer than `LEAST_EFFECTIVE` samples per prompt would carry it. Of normal rewards that
    many are left while ``n exp(-2 KL) >= 8``: up to 1 nat with 64 samples, 2 with 512.

    >>> rewards = torch.arange(64.0).expand(2, 64)
    >>> round(limit_at(rewards, 1.0).kl, 6), limit_at(rewards, 1.0).reward > 48
    (1.0, True)
    """
    return _law(rewards, lambda law: law.kl - kl, f"{kl:g} nats")


def limit_for(rewards: Tensor, gain: float) -> Law:
    """The least KL of a policy with this gain over the reference's mean reward; arguments and NaN as of `limit_at`.

    >>> law = limit_for(torch.tensor([[0.0, 1.0]] * 8).repeat(1, 16), 0.25)     # 0.5 + 0.25, as in `Law.tilted`
    >>> round(law.kl, 6)
    0.130812
    """
    mean = float(rewards.double().mean())
    return _law(rewards, lambda law: law.reward - mean - gain, f"a gain of {gain:g}")


def efficiency(rewards: Tensor, gain: float, kl: float) -> float:
    """KL that the limit needs for a policy's gain, over the policy's KL; at most 1, and negative for a loss.

    A loss counts as minus what the same gain would need. Best of n has about 0.9; a policy with noise in every token
    near 0.
    """
    return float(np.sign(gain)) * limit_for(rewards, abs(gain)).kl / kl


def _law(rewards: Tensor, excess: Callable[[Law], float], what: str) -> Law:
    """The law at which ``excess``, which rises with lambda, is 0."""

    def over(strength: float) -> float:
        return excess(Law.tilted(rewards, strength))

    spread = float((rewards - rewards.mean(1, keepdim=True)).double().std())
    low, high = 0.0, 0.1 / max(spread, 1e-10)
    while over(high) < 0 and high < 1e9 and Law.tilted(rewards, high).effective > LEAST_EFFECTIVE:
        low, high = high, 2 * high
    if over(low) <= 0 <= over(high):
        law = Law.tilted(rewards, brentq(over, low, high))
        if law.effective >= LEAST_EFFECTIVE:
            return law
    warnings.warn(f"{rewards.shape[1]} samples per prompt cannot tell the limit at {what}", stacklevel=3)
    return Law(*[math.nan] * 4)


def fit_values(
    ids: Tensor, mask: Tensor, rewards: Tensor, vocab: int, prompts: PromptBatch | None = None, group: int = 1
) -> tuple[Tensor, float, float]:
    """Values of tokens by ridge regression of rewards [n] on the counts of tokens in completions [n, T].

    What the prompt explains is no merit of the completion. Counts of the ``prompts``' tokens are further features;
    without ``prompts``, rows are groups of G = ``group`` completions of one prompt, and rewards and counts are taken
    relative to the group's mean. The penalty is the one of `PENALTIES` with the best predictions of `FOLDS` parts, of
    whole groups, from the others. Completions without a finite reward count not.

    Returns the values s [V] in units of the reward, float32, 0 for a token that was never seen; R2, the share of the
    rewards' variance that these predictions explain; and the factor by which they predict best, at least 0.

    >>> ids = torch.randint(0, 5, (400, 6), generator=torch.Generator().manual_seed(0))
    >>> values, r2, _ = fit_values(ids, torch.ones_like(ids), (ids == 3).sum(1).double(), vocab=5, group=4)
    >>> [round(x, 1) for x in (values - values.mean()).tolist()], r2 > 0.99
    ([-0.2, -0.2, -0.2, 0.8, -0.2], True)
    """
    kept, y, groups = _scored(rewards, group)
    design = _counts(ids, mask, vocab)
    fold = (np.random.default_rng(0).permutation(len(rewards) // group) % FOLDS)[groups]
    if prompts is not None:
        design = sparse.hstack([design, _counts(prompts.ids, prompts.mask, vocab)], format="csr")
        groups = np.zeros_like(groups)  # all rows are one
    design = design[kept]
    if len(set(fold)) < FOLDS:
        return torch.zeros(vocab), 0.0, 0.0
    # Of each penalty: rewards squared, their product with predictions, these squared.
    sums = np.zeros((len(PENALTIES), 3))
    for number in range(FOLDS):
        inside, found = fold == number, None
        part, rows = design[inside], groups[inside]
        for i, penalty in enumerate(PENALTIES):
            found = _ridge(design[~inside], y[~inside], groups[~inside], penalty, found)
            rest = _centred(y[inside] - part[:, vocab:] @ found[vocab:], rows)
            predicted = _centred(part[:, :vocab] @ found[:vocab], rows)
            sums[i] += rest @ rest, rest @ predicted, predicted @ predicted
    total, product, square = np.maximum(sums, 1e-300).T
    r2 = (2 * sums[:, 1] - square) / total
    best = r2.argmax()
    values = torch.from_numpy(_ridge(design, y, groups, PENALTIES[best])[:vocab])
    return values.float(), float(r2[best]), float(product[best] / square[best])


class Agreement(NamedTuple):
    """How well numbers predict rewards that they were not fitted on, both relative to their group's mean."""

    r2: float  # share of rewards' variance explained at the best factor, ``sign(r) r^2``; r is their correlation
    slope: float  # the best factor, at least 0
    t: float  # standard errors of r above 0, ``r sqrt(f / (1 - r^2))`` with f degrees of freedom

    @classmethod
    def of(cls, predicted: Tensor, rewards: Tensor, group: int) -> Agreement:
        """That of predictions [n] with rewards [n], of which those that are not finite count not, in groups.

        >>> Agreement.of(torch.tensor([-1.0, 1.0, 5.0, 9.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]), 2)[:2]
        (0.9, 0.3)
        """
        kept, y, groups = _scored(rewards, group)
        x, y = _centred(predicted.double().cpu().numpy()[kept], groups), _centred(y, groups)
        product, square = float(x @ y), max(float(x @ x), 1e-300)
        r2 = product**2 / max(square * float(y @ y), 1e-300)
        freedom = len(y) - len(set(groups))
        t = (r2 * freedom / max(1 - r2, 1e-300)) ** 0.5
        return cls(math.copysign(r2, product), max(0.0, product / square), math.copysign(t, product))


def predictions(values: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """Sums [n] of values [V] over completions [n, T], in double."""
    return (values.double().to(ids.device)[ids] * mask).sum(1)


def gradient_values(objective: Objective, policy: Policy, texts: Completions) -> Tensor:
    """Values of tokens [V] from one gradient of a differentiable reward: ``s(v) = E[v] . g``, in units of the reward.

    g [D] is the reward's gradient in the embeddings of completions, its mean over completions and positions; where
    rewards read a table of their own, the sum over tables. This is the direction in which straight-through gradients
    push every logit, averaged, and followed exactly instead of by an adapter. Values are relative to their mean over
    these positions: a completion has none for its length.
    """
    own = [part.reads for part in objective.reward_model.learned if part.reads is not None]
    tables = [EmbeddingTable(policy.embedding_weight, policy.embedding_scale), *own]
    found = []  # of each batch, the sums of gradients by table
    for prompts, ids, mask in texts.batches(BATCH):
        embeds = [table.embed(ids).detach().requires_grad_() for table in tables]
        with torch.enable_grad():
            read = iter(embeds[1:])  # a part's own table is asked for once, in their order
            value = objective.reward(
                tables[0].embed(prompts.ids), prompts, embeds[0], mask, lambda _, read=read: next(read)
            )
            gradients = torch.autograd.grad(value.sum(), embeds, materialize_grads=True)
        found.append([(gradient.double() * mask.unsqueeze(-1)).sum((0, 1)) for gradient in gradients])
    tokens = texts.ids[texts.mask.bool()]
    share = tokens.bincount(minlength=policy.vocab_size).double() / len(tokens)
    values = sum(
        table.weight.double() @ (sum(sums) * table.scale / len(tokens))
        for table, *sums in zip(tables, *found, strict=True)
    )
    return (values - values @ share).float()


def _scored(rewards: Tensor, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which completions have a reward; these rewards; and the number of the group of each."""
    y = rewards.double().cpu().numpy()
    kept = np.flatnonzero(np.isfinite(y))
    return kept, y[kept], kept // group


def _counts(ids: Tensor, mask: Tensor, vocab: int) -> sparse.csr_matrix:
    """Counts of tokens [n, V] in rows of ids."""
    rows, columns = mask.bool().cpu().nonzero(as_tuple=True)
    tokens = ids.cpu()[rows, columns]
    return sparse.csr_matrix((np.ones(len(rows)), (rows.numpy(), tokens.numpy())), shape=(len(ids), vocab))


def _centred(x: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Numbers [n] relative to the mean of their group."""
    return x - (np.bincount(groups, x) / np.maximum(np.bincount(groups), 1))[groups]


def _ridge(
    design: sparse.csr_matrix, y: np.ndarray, groups: np.ndarray, penalty: float, start: np.ndarray | None = None
) -> np.ndarray:
    """The solution of ``(X' X + penalty) s = X' y``, with X and y relative to their groups' means.

    By conjugate gradients, preconditioned with the diagonal: counts of different tokens are nearly uncorrelated.
    """

    def product(s: np.ndarray) -> np.ndarray:
        return design.T @ _centred(design @ s, groups) + penalty * s

    operator = LinearOperator((design.shape[1],) * 2, product)
    inverse = sparse.diags(1 / (penalty + design.power(2).sum(0).A1))
    return cg(operator, design.T @ _centred(y, groups), start, rtol=RESIDUAL, M=inverse)[0]
