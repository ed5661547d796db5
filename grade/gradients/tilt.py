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
differentiable reward in the embeddings (`gradient_values`); c sets KL. R2 out of sample says beforehand what to
expect: where tokens alone explain a share of the reward, the efficiency is about that share.

Left out: values that depend on position or context.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import numpy as np
import torch
from scipy import sparse
from scipy.optimize import brentq
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from grade.gradients.objective import Objective
from grade.models.batch import PromptBatch
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


@dataclass(frozen=True)
class Law:
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
    nan = Law(*[math.nan] * 4)
    spread = float((rewards - rewards.mean(1, keepdim=True)).double().std())
    if spread > 0:
        low, high = 0.0, 0.1 / spread
        while excess(Law.tilted(rewards, high)) < 0 and Law.tilted(rewards, high).effective > 1.01 and high < 1e9:
            low, high = high, 2 * high
        if excess(Law.tilted(rewards, low)) <= 0 <= excess(Law.tilted(rewards, high)):
            law = Law.tilted(rewards, brentq(lambda x: excess(Law.tilted(rewards, x)), low, high))
            if law.effective >= LEAST_EFFECTIVE:
                return law
    warnings.warn(f"{rewards.shape[1]} samples per prompt cannot tell the limit at {what}", stacklevel=3)
    return nan


@dataclass(frozen=True)
class TokenValues:
    """What each token adds to the reward of a completion, and how well that explains rewards not fitted."""

    values: Tensor  # s [V] in units of the reward, float32; 0 for a token that was never seen
    r2: float  # share of the rewards' variance, the prompt's part removed, explained out of sample
    slope: float  # factor by which they predict best out of sample, at least 0
    penalty: float  # the ridge penalty that was chosen


def fit_values(
    ids: Tensor, mask: Tensor, rewards: Tensor, vocab: int, prompts: PromptBatch | None = None, group: int = 1
) -> TokenValues:
    """Values of tokens by ridge regression of rewards [n] on the counts of tokens in completions [n, T].

    What the prompt explains is no merit of the completion. With ``group`` G > 1, rows are groups of G completions of
    one prompt, and rewards and counts are taken relative to the group's mean; otherwise counts of the ``prompts``'
    tokens are further features. The penalty is the one of `PENALTIES` with the best predictions of `FOLDS` parts, of
    whole groups, from the others; ``r2`` is that of these predictions. Completions without a finite reward count not.

    >>> ids = torch.randint(0, 5, (400, 6), generator=torch.Generator().manual_seed(0))
    >>> fit = fit_values(ids, torch.ones_like(ids), (ids == 3).sum(1).double(), vocab=5, group=4)
    >>> [round(x, 1) for x in (fit.values - fit.values.mean()).tolist()], fit.r2 > 0.99
    ([-0.2, -0.2, -0.2, 0.8, -0.2], True)
    """
    kept, y, groups = _scored(rewards, group)
    design = _counts(ids, mask, vocab)
    if prompts is not None and group == 1:
        design = sparse.hstack([design, _counts(prompts.ids, prompts.mask, vocab)], format="csr")
    design = design[kept]
    fold = (np.random.default_rng(0).permutation(len(rewards) // group) % FOLDS)[groups]
    if group == 1:
        groups = np.zeros_like(groups)  # all rows are one
    if len(set(fold)) < FOLDS:
        return TokenValues(torch.zeros(vocab), 0.0, 0.0, PENALTIES[0])
    # Of each penalty: rewards squared, their product with predictions, these squared.
    sums = np.zeros((len(PENALTIES), 3))
    for number in range(FOLDS):
        inside, found = fold == number, None
        others, part, rows = design[~inside], design[inside], groups[inside]
        for i, penalty in enumerate(PENALTIES):
            found = _ridge(others, y[~inside], groups[~inside], penalty, found)
            rest = _centred(y[inside] - part[:, vocab:] @ found[vocab:], rows)
            predicted = _centred(part[:, :vocab] @ found[:vocab], rows)
            sums[i] += rest @ rest, rest @ predicted, predicted @ predicted
    total, product, square = np.maximum(sums, 1e-300).T
    r2 = (2 * sums[:, 1] - square) / total
    best = int(r2.argmax())
    values = _ridge(design, y, groups, PENALTIES[best])[:vocab]
    return TokenValues(
        torch.from_numpy(values).float(), float(r2[best]), float(product[best] / square[best]), PENALTIES[best]
    )


@dataclass(frozen=True)
class Agreement:
    """How well values of tokens predict rewards that they were not fitted on, both relative to their group's mean.

    >>> Agreement(3.0, 9.0, 4.0, 16.0).r2, Agreement(3.0, 9.0, 4.0, 16.0).slope
    (0.25, 0.3333333333333333)
    """

    product: float = 0.0  # sum of predictions times rewards
    predicted: float = 0.0  # sum of predictions squared
    rewarded: float = 0.0  # sum of rewards squared
    freedom: float = 0.0  # degrees of freedom: completions with a reward, less their groups

    @classmethod
    def of(cls, values: Tensor, ids: Tensor, mask: Tensor, rewards: Tensor, group: int) -> Agreement:
        """That of values [V] with completions; other arguments as of `fit_values`."""
        kept, y, groups = _scored(rewards, group)
        predicted = (values.double().to(ids.device)[ids] * mask).sum(1).cpu().numpy()[kept]
        predicted, y = _centred(predicted, groups), _centred(y, groups)
        sums = predicted @ y, predicted @ predicted, y @ y, len(y) - len(set(groups))
        return cls(*map(float, sums))

    def __add__(self, other: Agreement) -> Agreement:
        """That of both sets of completions."""
        return Agreement(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def r2(self) -> float:
        """Share of rewards' variance explained at the best factor, ``sign(r) r^2``: negative if values oppose it."""
        return math.copysign(self.product**2, self.product) / max(self.predicted * self.rewarded, 1e-300)

    @property
    def slope(self) -> float:
        """The best factor, at least 0."""
        return max(0.0, self.product / max(self.predicted, 1e-300))

    @property
    def t(self) -> float:
        """Standard errors of the correlation r above 0, ``r sqrt(f / (1 - r^2))``, f the degrees of freedom."""
        return math.copysign((abs(self.r2) * self.freedom / max(1 - abs(self.r2), 1e-300)) ** 0.5, self.product)


def _scored(rewards: Tensor, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which completions have a reward; these rewards; and the number of the group of each."""
    y = rewards.double().cpu().numpy()
    kept = np.isfinite(y)
    return kept, y[kept], np.arange(len(y))[kept] // group


def gradient_values(
    objective: Objective, policy: Policy, batches: Iterable[tuple[PromptBatch, Tensor, Tensor]]
) -> Tensor:
    """Values of tokens [V] from one gradient of a differentiable reward: ``s(v) = E[v] . g``, in units of the reward.

    g [D] is the reward's gradient in the embeddings of completions (prompts, ids and mask [B, T] of each batch), its
    mean over completions and positions; where rewards read a table of their own, the sum over tables. This is the
    direction in which straight-through gradients push every logit, averaged, and followed exactly instead of by an
    adapter. Values are relative to their mean over these positions: a completion has none for its length.
    """
    table = EmbeddingTable(policy.embedding_weight, policy.embedding_scale)
    sums: dict[int, tuple[EmbeddingTable, Tensor]] = {}
    counts = torch.zeros(policy.vocab_size, dtype=torch.float64)
    for prompts, ids, mask in batches:
        leaves: dict[int, tuple[EmbeddingTable, Tensor]] = {}

        def embedded(table: EmbeddingTable, ids: Tensor = ids, leaves: dict = leaves) -> Tensor:
            leaves[id(table)] = table, table.embed(ids).detach().requires_grad_()
            return leaves[id(table)][1]

        with torch.enable_grad():
            value = objective.reward(table.embed(prompts.ids), prompts, embedded(table), mask, embedded)
            tables, embeds = zip(*leaves.values(), strict=True)
            gradients = torch.autograd.grad(value.sum(), embeds, allow_unused=True)
        for one, gradient in zip(tables, gradients, strict=True):
            if gradient is not None:
                total = (gradient.double() * mask.unsqueeze(-1)).sum((0, 1))
                sums[id(one)] = one, total + sums.get(id(one), (one, 0.0))[1]
        counts += ids[mask.bool()].cpu().bincount(minlength=len(counts))
    share = (counts / counts.sum()).to(policy.device)
    values = sum(one.weight.double() @ (total * one.scale / counts.sum()) for one, total in sums.values())
    return (values - values @ share).float()


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
