"""A reward distilled from scored text: no policy, no samples, no groups.

A reward is a function of text, and to score a text costs far less than to sample one. So the distilled reward is fitted
first to N texts like those that the policy should write, each scored once: a corpus, an SFT set, completions of the
reference that were drawn once. With the features x of a completion (`grade.gradients.distilled.families`) and z of its
prompt,

    min_{w, u, c}  sum_i (R_i - c - <w, x_i> - <u, z_i>)^2 + lambda (|w|^2 + |u|^2).

There are no groups, so the prompt's own part <u, z> takes what the prompt explains; otherwise the words of easy prompts
would be rewarded. Family and penalty are chosen, and slope and R2 measured, on predictions that `FOLDS` fits make of
prompts which they have not seen. What remains of the reward without the prompt's part is what is explained.

Conjugate gradients take seconds at 30,000 texts and a vocabulary of 50,000: scikit-learn's where all rows are sparse.
Dense features (`bag`) are few and correlated, so the equations are preconditioned with their own Gram matrix.
Leave-one-out in closed form would take ``n^3``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_matrix, hstack
from scipy.sparse.linalg import LinearOperator, cg
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold
from torch import Tensor

from grade.errors import InputError
from grade.gradients.distilled.families import Family
from grade.gradients.distilled.ridge import PENALTIES, Choice, calibrated
from grade.gradients.distilled.store import Fit
from grade.models.prompts import PromptBatch, ScoredTexts
from grade.models.scoring import predicting_hidden

FOLDS = 5
"""Fits of the cross-validation."""
FEWEST = 8
"""Texts that a fit needs."""
TOLERANCE = 1e-6
"""Relative residual at which conjugate gradients end."""
TILTS = 24
"""Points of the curve of `promise`."""


@torch.no_grad()
def fit_texts(families: Mapping[str, Family], texts: ScoredTexts, batch: int = 256) -> Fit:
    """Distil the reward of N texts in the family that explains most; texts without a reward are left out.

    Features are taken of ``batch`` texts at a time. `InputError` if too few texts have a reward, or all have the same.
    """
    texts = texts[texts.rewards.isfinite().nonzero().flatten()] if texts.rewards.isnan().any() else texts
    rewards = texts.rewards.double().cpu().numpy()
    if len(texts) < FEWEST:
        raise InputError("texts", f"{len(texts)} with a reward", f"at least {FEWEST}")
    if np.ptp(rewards) <= 1e-8 * np.abs(rewards).max():
        raise InputError("texts", f"{len(texts)} with reward {rewards[0]:g}", "texts whose rewards differ")
    backbone = next(iter(families.values())).backbone
    own = _own_part(texts.prompts, backbone.vocab_size)
    folds = _folds(texts.prompts)
    features = {name: _features(family, texts, batch) for name, family in families.items()}
    choices = {name: _cross_validated(rows, own, rewards, folds) for name, rows in features.items()}
    best = max(choices, key=lambda name: choices[name].r2)
    (weights,) = _ridges([choices[best].penalty], features[best], own, rewards)
    weights = torch.from_numpy(weights[: features[best].shape[1]]).to(backbone.device, families[best].dtype)
    return Fit(best, weights.unsqueeze(0), choices[best])


def _features(family: Family, texts: ScoredTexts, batch: int) -> csr_matrix | np.ndarray:
    """Features [N, F] of the completions."""
    parts = (texts[start : start + batch] for start in range(0, len(texts), batch))
    return family.matrix(torch.cat([family.rows(part.ids, part.mask).cpu() for part in parts]))


def _own_part(prompts: PromptBatch, vocab: int) -> csr_matrix:
    """How often each token occurs in each prompt [N, V]."""
    rows, columns = prompts.mask.cpu().nonzero(as_tuple=True)
    ones = np.ones(len(rows))
    return csr_matrix((ones, (rows.numpy(), prompts.ids.cpu()[rows, columns].numpy())), (len(prompts), vocab))


def _folds(prompts: PromptBatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Texts to fit and to predict: those of one prompt are in one fold."""
    tokens = torch.where(prompts.mask.bool(), prompts.ids, -1).cpu().numpy()
    groups = np.unique(tokens, axis=0, return_inverse=True)[1].ravel()
    distinct = int(groups.max()) + 1
    if distinct < 2:
        raise InputError("texts", "one prompt", "at least two: predictions are judged on other prompts")
    splitter = GroupKFold(min(FOLDS, distinct), shuffle=True, random_state=0)
    return list(splitter.split(groups, groups=groups))


def _ridges(
    penalties: Sequence[float], rows: csr_matrix | np.ndarray, own: csr_matrix, rewards: np.ndarray
) -> Iterator[np.ndarray]:
    """For each penalty the weights [F + V] of completions' and prompts' features, with an intercept apart."""
    if isinstance(rows, csr_matrix):
        both = hstack([rows, own], format="csr")
        for penalty in penalties:
            yield Ridge(penalty, solver="sparse_cg", tol=TOLERANCE).fit(both, rewards).coef_
        return
    size, x, y = rows.shape[1], rows - rows.mean(0), rewards - rewards.mean()
    mean, gram = np.asarray(own.mean(0)).ravel(), x.T @ x
    squares = np.asarray(own.multiply(own).sum(0)).ravel() - len(y) * mean * mean

    def transposed(residual: np.ndarray) -> np.ndarray:
        return np.concatenate([x.T @ residual, own.T @ residual - mean * residual.sum()])

    for penalty in penalties:
        factor = cho_factor(gram + penalty * np.eye(size))

        def normal(w: np.ndarray, penalty: float = penalty) -> np.ndarray:
            return transposed(x @ w[:size] + own @ w[size:] - mean @ w[size:]) + penalty * w

        def inverse(w: np.ndarray, penalty: float = penalty, factor: Any = factor) -> np.ndarray:
            return np.concatenate([cho_solve(factor, w[:size]), w[size:] / (squares + penalty)])

        shape = 2 * (size + own.shape[1],)
        yield cg(LinearOperator(shape, normal), transposed(y), rtol=TOLERANCE, M=LinearOperator(shape, inverse))[0]


def _cross_validated(
    rows: csr_matrix | np.ndarray, own: csr_matrix, rewards: np.ndarray, folds: Sequence[tuple[np.ndarray, np.ndarray]]
) -> Choice:
    """The best penalty, in units of the mean square of a row, with its out-of-sample slope."""
    size, choices = rows.shape[1], list[Choice]()
    square = float((rows.multiply(rows) if isinstance(rows, csr_matrix) else rows * rows).sum()) / len(rewards)
    penalties = [share * max(square, 1e-12) for share in sorted(PENALTIES, reverse=True)]
    solvers = [_ridges(penalties, rows[fitted], own[fitted], rewards[fitted]) for fitted, _ in folds]
    for penalty in penalties:
        predicted, prompts = np.empty((2, len(rewards)))
        for (_, held_out), solver in zip(folds, solvers, strict=True):
            weights = next(solver)
            predicted[held_out], prompts[held_out] = rows[held_out] @ weights[:size], own[held_out] @ weights[size:]
        # Both parts without what the prompt's part explains of them: the two are correlated where they share words.
        parts = (torch.from_numpy(_without(prompts, each)) for each in (predicted, rewards))
        choices.append(Choice(penalty, *calibrated(*parts, 1)))
        if len(choices) > 1 and choices[-1].r2 < choices[-2].r2:  # smaller ones, which take longest, explain less still
            break
    return max(choices, key=lambda choice: choice.r2)


def _without(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The residuals [n] of y on x and a constant."""
    x, y = x - x.mean(), y - y.mean()
    return y - x * (x @ y) / max(x @ x, np.finfo(float).tiny)


@dataclass(frozen=True)
class Promise:
    """What a distilled reward promises: the reward and the KL of tilted policies, see `promise`."""

    weights: Tensor  # lambda, ascending, 1 / reward
    kl: Tensor  # nats per completion, at each
    gain: Tensor  # reward, at each
    length: float  # mean tokens of a completion

    def at(self, kl: float) -> tuple[float, float]:
        """Gain at this KL, and the beta whose optimum it is; at the largest tilt if KL does not get there."""
        levels = self.kl.numpy()
        tilt = float(np.interp(kl, levels, self.weights.numpy()))
        gain = float(np.interp(kl, levels, self.gain.numpy()))
        return gain, self.length / tilt if tilt > 0 else math.inf


@torch.no_grad()
def promise(family: Family, weights: Tensor, texts: ScoredTexts) -> Promise:
    """Gain and KL of the policies that are best token by token, along given text.

    The weights [1, F] of a family, with the slope, give s_t(v); the texts are the prefixes.
    ``pi_lambda(v | y_<t) ~ reference(v | y_<t) exp(lambda s_t(v))`` maximises ``E s_t - KL_t / lambda``, with ``KL_t =
    lambda E s_t - log E_reference exp(lambda s_t)``. Both are summed over the positions of a completion and averaged
    over the texts. Training along these texts comes close to it at ``beta = length / lambda``, as far as the adapter
    can. The reward rises with it only as far as the distilled one is right.
    """
    backbone = family.backbone
    with backbone.reference():
        hidden = predicting_hidden(backbone, texts.prompts, texts.ids)
    kept = texts.mask.flatten().bool().nonzero().flatten()
    values, spread = family.values(weights, texts.ids), float(family.typical(weights).std())
    tilts = torch.logspace(-1, 2.5, TILTS, dtype=torch.float64, device=kept.device) / max(spread, 1e-12)
    sums = torch.zeros(2, TILTS, dtype=torch.float64)
    for chunk in kept.split(64):
        logp = backbone.head(hidden.flatten(0, 1)[chunk]).log_softmax(-1).double()
        s = values(chunk).double()
        start = (logp.exp() * s).sum(-1, keepdim=True)
        normaliser, mean = _tilted(logp, s, tilts)
        sums += torch.stack([(tilts * mean - normaliser).sum(0), (mean - start).sum(0)]).cpu()
    kl, gain = sums / len(texts)
    return Promise(tilts.cpu(), kl.cummax(0).values, gain, len(kept) / len(texts))


def _tilted(logp: Tensor, s: Tensor, tilts: Tensor) -> tuple[Tensor, Tensor]:
    """``log sum_v p_v exp(lambda s_v)`` and the mean of s by these weights, each [n, K], at K tilts lambda."""
    if len(s) == 1:  # all positions have the same: two products with [V, K] in place of K exponentials of [n, V]
        s, top, p = s.T, s.max(), logp.exp()
        weights = ((s - top) * tilts).exp()
        total = p @ weights
        return total.log() + tilts * top, p @ (s * weights) / total
    normalisers, means = [], []
    for tilt in tilts:
        tilted = logp + tilt * s
        normalisers.append(tilted.logsumexp(-1))
        means.append((tilted.softmax(-1) * s).sum(-1))
    return torch.stack(normalisers, 1), torch.stack(means, 1)
