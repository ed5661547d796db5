"""Kernel ridge regression on groups, with leave-one-group-out predictions in closed form.

Rewards ``y`` [n] and features are centred within groups of G completions of one prompt, so what is learned is which
completion of a prompt is better, not which prompt is easier. With the Gram matrix ``K`` [n, n] of centred features,

    alpha = (K + lambda I)^-1 y,    C = (K + lambda I)^-1.

Fitted without group g, the residuals of its completions are ``C_gg^-1 alpha_g`` and the coefficients of all others
``alpha - C_:g C_gg^-1 alpha_g`` (those of g are then 0): no group is ever judged by a fit that has seen it, and no fit
is repeated (Rifkin and Lippert 2007, for groups of one).

Everything is float64. Groups have equal size and are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-8
"""Predictions below this share of the rewards' size are rounding: groups without a common feature predict nothing."""
SIGNIFICANT = 3.0
"""Standard errors by which the reward's slope on its prediction must exceed 0: it is the best of several fits."""
PENALTIES = (0.01, 0.1, 1.0, 10.0)
"""Ridge penalties, in units of the mean diagonal of the Gram matrix."""


@dataclass(frozen=True)
class Choice:
    """How well one penalty does out of sample."""

    penalty: float  # in the features' own units
    # share of the within-prompt variance of the reward that is explained, ``1 - |y - c p|^2 / |y|^2`` at the slope c,
    # with p the predictions without their own group; negative if they point the wrong way
    r2: float
    raw_slope: float  # c, the reward's slope on its prediction. Ridge shrinks predictions, so it is usually above 1.
    stderr: float  # its standard error, over groups; infinite where three or fewer decide

    @property
    def significant(self) -> bool:
        """Whether the reward rises with its prediction beyond doubt."""
        return self.raw_slope > SIGNIFICANT * self.stderr

    @property
    def shrinkage(self) -> float:
        """Shrinkage factor of the slope, ``1 - (stderr / c)^2``, at least 0 (James and Stein's estimator)."""
        return max(0.0, 1 - (self.stderr / self.raw_slope) ** 2) if self.raw_slope > 0 else 0.0

    @property
    def slope(self) -> float:
        """The shrunk slope, by which predictions are multiplied; 0 where it is not distinguishable from 0."""
        return self.raw_slope * self.shrinkage if self.shrinkage else 0.0


def centred(values: Tensor, group: int) -> Tensor:
    """Values [n, ...] minus the mean of their group of G rows."""
    grouped = values.view(-1, group, *values.shape[1:])
    return (grouped - grouped.mean(1, keepdim=True)).view(values.shape)


@dataclass(frozen=True)
class Spectrum:
    """Eigendecomposition ``K = Q diag(l) Q^T``, which serves all penalties and rewards."""

    values: Tensor  # l [n], at least 0
    vectors: Tensor  # Q [n, n], in columns

    @classmethod
    def of(cls, gram: Tensor) -> Spectrum:
        """That of a Gram matrix [n, n]."""
        values, vectors = torch.linalg.eigh(gram)
        return cls(values.clamp_min(0), vectors)  # below 0 by rounding alone

    @property
    def scale(self) -> float:
        """Mean diagonal of the Gram matrix."""
        return float(self.values.mean())


def choose(spectrum: Spectrum, rewards: Tensor, group: int, penalties: Sequence[float] = PENALTIES) -> Choice:
    """The penalty that explains most out of sample.

    The spectrum is of the Gram matrix of centred features [n, n], rewards are centred [n]. Slope and R2 are 0 if there
    is nothing to explain or to explain it with.
    """
    scale = spectrum.scale
    if len(rewards) < 2 * group or not scale > 0 or not float(rewards @ rewards) > 0:
        return Choice(penalties[-1] * (scale if scale > 0 else 1.0), 0.0, 0.0, math.inf)
    penalties = [penalty * scale for penalty in penalties]
    fits = (calibrated(left_out(spectrum, rewards, group, penalty), rewards, group) for penalty in penalties)
    return max((Choice(penalty, *fit) for penalty, fit in zip(penalties, fits, strict=True)), key=lambda fit: fit.r2)


def left_out(spectrum: Spectrum, rewards: Tensor, group: int, penalty: float) -> Tensor:
    """Predictions [n] of each completion by the fit without its group, centred within groups.

    From the spectrum, ``C = Q diag(1 / (l + lambda)) Q^T``, and centred rewards [n]; the penalty lambda is above 0.
    """
    inverse, grouped = 1 / (spectrum.values + penalty), spectrum.vectors.view(-1, group, len(rewards))
    blocks = (grouped * inverse) @ grouped.mT  # C_gg
    alpha = spectrum.vectors @ (inverse * (rewards @ spectrum.vectors))
    return centred(rewards - torch.linalg.solve(blocks, alpha.view(-1, group, 1)).flatten(), group)


def negligible(predicted: Tensor, rewards: Tensor) -> bool:
    """Whether centred predictions of centred rewards are 0 up to rounding."""
    return not float(predicted.norm()) > ROUNDING * float(rewards.norm())


def calibrated(predicted: Tensor, rewards: Tensor, group: int) -> tuple[float, float, float]:
    """R2, slope and the slope's standard error, of centred rewards [n] on their centred predictions [n].

    With s the groups' sums of squared predictions, ``m = (sum s)^2 / sum s^2`` groups decide the slope. The error is
    that over groups times ``sqrt(m / (m - 3))``: the variance of Student's t with m - 1 degrees of freedom.
    """
    square, total = float(predicted @ predicted), float(rewards @ rewards)
    if negligible(predicted, rewards) or not total > 0 or not math.isfinite(1 / square):
        return 0.0, 0.0, math.inf
    slope = float(predicted @ rewards) / square
    products = torch.stack([predicted * (rewards - slope * predicted), predicted * predicted / square])
    rest, shares = products.view(2, -1, group).sum(2)
    deciding = 1 / float(shares @ shares)
    few = deciding <= 3 + ROUNDING
    stderr = math.inf if few else math.sqrt(float(rest @ rest) * deciding / (deciding - 3)) / square
    r2 = math.copysign(slope * slope * square / total, slope)
    return r2, slope, stderr


def coefficients(gram: Tensor, rewards: Tensor, group: int, penalty: float, without: Sequence[int]) -> Tensor:
    """Coefficients [1 + k, n] of the fit on all groups, and of the fits without one of the k groups ``without``.

    From the Gram matrix of centred features [n, n] and centred rewards [n]. The penalty is a constant: in units of this
    matrix it would depend on the completions that a fit leaves out.
    """
    shifted = gram.clone()
    shifted.diagonal().add_(penalty)
    factor = torch.linalg.cholesky(shifted)
    alpha = torch.cholesky_solve(rewards.unsqueeze(1), factor).squeeze(1)
    rows = (torch.tensor(list(without), dtype=torch.long).unsqueeze(1) * group + torch.arange(group)).to(gram.device)
    if not len(rows):
        return alpha.unsqueeze(0)
    unit = torch.zeros(len(gram), rows.numel(), dtype=gram.dtype, device=gram.device)
    unit[rows.flatten(), torch.arange(rows.numel(), device=gram.device)] = 1
    columns = torch.cholesky_solve(unit, factor)  # of C, for the groups that are left out
    result = [alpha]
    for number, own in enumerate(rows):
        part = columns[:, number * group : (number + 1) * group]
        rest = alpha - part @ torch.linalg.solve(part[own], alpha[own])
        rest[own] = 0.0  # exactly, not up to rounding: the fit has not seen them
        result.append(rest)
    return torch.stack(result)
