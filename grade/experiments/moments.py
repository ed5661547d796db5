r"""Quality of gradient estimators: bias, variance, cosine with the truth, and worth.

An estimator's gradient from one sample has mean ``m`` and covariance ``C``; the truth is ``mu``. Averaged over n
independent samples it is ``g_n`` with ``E|g_n|^2 = |m|^2 + tr C / n``. Everything here follows from four numbers,
``<m, mu>``, ``|m|^2``, ``tr C`` and ``|mu|^2`` (`Moments`):

    bias^2 = |m - mu|^2,    MSE_n = bias^2 + tr C / n,
    cos_n = <m, mu> / (|mu| sqrt(E|g_n|^2)).

``cos_n`` is the expected cosine with the norm's root mean square for the norm, and no approximation in another
sense: at the best scale, the relative squared error of ``g_n`` is ``1 - cos_n^2``. So methods with equal cosine are
equally good for an optimizer with the best step size.

Estimates come from R rows, each the mean of ``size`` samples. Products of different rows are unbiased for products of
means, ``sum_{i != j} x_i . y_j / (R (R - 1))``, where a product of the averages would add noise. Rows of several
estimators may be paired (made from the same completions). Standard errors are jackknives over rows.

How gradients are made is left to the experiments.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grade.errors import InputError
from grade.experiments.intervals import Interval, interval

_CHUNK = 2**16
"""Columns of gradients that are converted to float64 at once."""


@dataclass(frozen=True)
class Moments:
    """The four numbers of one estimator, for all rows and with each row left out in turn: arrays [1 + R]."""

    inner: np.ndarray  # ``<m, mu>``
    norm2: np.ndarray  # ``|m|^2``
    noise: np.ndarray  # ``tr C``, of one sample
    ref2: np.ndarray  # ``|mu|^2``

    @property
    def bias2(self) -> np.ndarray:
        """``|m - mu|^2``, estimated without bias (so it may be negative)."""
        return self.norm2 - 2 * self.inner + self.ref2

    def mse(self, n: float = 1) -> np.ndarray:
        """Mean squared error of the mean of n samples."""
        return self.bias2 + self.noise / n

    def cosine(self, n: float = 1) -> np.ndarray:
        """``cos_n``; with n = inf that of the means. NaN where a squared norm is estimated as negative."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.inner / np.sqrt(self.ref2 * (self.norm2 + self.noise / n))


def _gram(x: Tensor, y: Tensor) -> np.ndarray:
    """Inner products [R, R'] of rows [R, P] and [R', P], summed in float64."""
    total = torch.zeros(len(x), len(y), dtype=torch.float64)
    for a, b in zip(x.split(_CHUNK, 1), y.split(_CHUNK, 1), strict=True):
        total += (a.double() @ b.double().T).cpu()
    return total.numpy()


def moments(rows: Tensor, reference: Tensor, size: int = 1) -> Moments:
    """Moments of an estimator against the truth."""
    _check_rows(rows)
    if reference.ndim == 2 and len(reference) != len(rows) or reference.shape[-1] != rows.shape[-1]:
        raise InputError("reference gradient", list(reference.shape), f"[P] or [R, P] with [R, P] = {list(rows.shape)}")
    sets = _leave_one_out(len(rows))
    own = _gram(rows, rows)
    norm2, square = _off_diagonal(own, sets), sets @ own.diagonal() / sets.sum(1)
    if reference.ndim == 1:
        exact = reference.unsqueeze(0)
        inner = sets @ _gram(rows, exact)[:, 0] / sets.sum(1)
        ref2 = np.full(len(sets), _gram(exact, exact)[0, 0])
    else:
        inner, ref2 = (_off_diagonal(_gram(other, reference), sets) for other in (rows, reference))
    return Moments(inner, norm2, size * (square - norm2), ref2)


def sketch(size: int, dim: int, seed: int = 0) -> Callable[[Tensor], Tensor]:
    """A fixed random projection that keeps inner products in expectation (count sketch, Charikar et al. 2002).

    From [P] to [min(P, dim)]: each number goes to one of ``dim`` sums with a random sign. Products of projected vectors
    have relative errors of about ``1 / sqrt(dim)`` of the product of their norms.
    """
    if size <= dim:
        return lambda gradient: gradient
    generator = torch.Generator().manual_seed(seed)
    bucket = torch.randint(dim, (size,), generator=generator)
    sign = torch.randint(2, (size,), generator=generator, dtype=torch.int8) * 2 - 1

    def project(gradient: Tensor) -> Tensor:
        return torch.zeros(dim, dtype=gradient.dtype).index_add_(0, bucket, gradient * sign)

    return project


def worth(moments: Moments, unbiased: Moments, n: float = 1) -> np.ndarray:
    """How many samples of an unbiased estimator one sample is worth, in a batch of n.

    ``N / n``, where N is the batch in which the unbiased estimator has the cosine that this one has at n. With
    ``p = <m, mu> / (|m| |mu|)``, ``v = tr C / |m|^2`` and ``u = tr C_u / |mu|^2``:

        N / n = u p^2 / (n (1 - p^2) + v).

    It falls with n where there is bias (p < 1); at n = 1 it is the worth of a sample on its own. [1 + R]; 0 where the
    estimator points away from the truth.
    """
    # In terms without a division by |m|^2 or |mu|^2, which noise may make small.
    along = np.clip(moments.inner, 0, None) ** 2
    left = n * (moments.norm2 * moments.ref2 - along) + moments.noise * moments.ref2
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(left > 0, unbiased.noise * along / (left * moments.ref2), np.inf)


def worth_interval(moments: Moments, unbiased: Moments, n: float = 1) -> Interval:
    """`worth` with an interval that exists for gradients without a direction too.

    On the logarithm where the cosine is more than three standard errors above 0; else on the signed square root, which
    is proportional to ``<m, mu>`` and so nearly normal about 0; worth below 0 is 0.
    """
    left = n * (moments.norm2 * moments.ref2 - moments.inner**2) + moments.noise * moments.ref2
    with np.errstate(invalid="ignore", divide="ignore"):
        root = interval(moments.inner * np.sqrt(unbiased.noise / (left * moments.ref2)))
    values = worth(moments, unbiased, n)
    if root.stderr is None or root.value > 3 * root.stderr:
        return interval(values, geometric=True)
    low, high = (max(end, 0.0) ** 2 for end in (root.low, root.high))
    return Interval(float(values[0]), low, high, root.stderr)


def crossover(moments: Moments, unbiased: Moments) -> np.ndarray:
    """Batch size at which an unbiased estimator's cosine overtakes: where `worth` is 1.

    ``n = (u p^2 - v) / (1 - p^2)`` in the notation of `worth`, [1 + R]; 0 if the unbiased one is better at every size,
    infinity if it never is.
    """
    along = np.clip(moments.inner, 0, None) ** 2
    gain = unbiased.noise * along / moments.ref2 - moments.noise * moments.ref2
    loss = moments.norm2 * moments.ref2 - along
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(gain <= 0, 0.0, np.where(loss > 0, gain / loss, np.inf))


def _check_rows(rows: Tensor, least: int = 3) -> None:
    """Reject rows too few or non-finite for an interval."""
    if rows.ndim != 2 or len(rows) < least:
        raise InputError("repeated gradients", list(rows.shape), f"[R, P] with R at least {least}")
    if not torch.isfinite(rows).all():
        raise InputError("repeated gradients", "NaN or infinity", "finite numbers")


def _off_diagonal(products: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """Mean of the products of different rows in each set."""
    count = sets.sum(1)
    return (((sets @ products) * sets).sum(1) - sets @ products.diagonal()) / (count * (count - 1))


def _leave_one_out(rows: int) -> np.ndarray:
    """[1 + R, R]: all rows, then all but one."""
    return np.concatenate([np.ones((1, rows)), 1 - np.eye(rows)])
