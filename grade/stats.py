"""Means and jackknife estimates with their standard errors; what gradient estimators are worth."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from grade.errors import InputError


def jackknife_stderr(without: np.ndarray | Tensor) -> float:
    """Jackknife standard error ``sqrt((R - 1) / R sum_r (x_r - mean(x))^2)`` of a statistic.

    >>> x = np.array([1.0, 2.0, 6.0])                       # the mean's is s / sqrt(n)
    >>> bool(np.isclose(jackknife_stderr((x.sum() - x) / 2), x.std(ddof=1) / 3**0.5))
    True
    """
    rows = len(without)
    return math.sqrt((rows - 1) / rows * ((without - without.mean()) ** 2).sum())


class Interval(NamedTuple):
    """An estimate with its 95 % interval and jackknife standard error, where there are such; see `interval`."""

    value: float
    low: float | None = None
    high: float | None = None
    stderr: float | None = None


def interval(values: np.ndarray, geometric: bool = False) -> Interval:
    """Jackknife interval, by Student's quantile of R - 1, of [1 + R] values: of all rows, and with each row left out.

    A geometric one is computed on the logarithm, for ratios; it has no interval if a value is not positive.

    >>> x = np.array([1.0, 2.0, 6.0])                      # the mean: its jackknife is s / sqrt(n)
    >>> mean = interval(np.array([3.0, 4.0, 3.5, 1.5]))
    >>> mean.value, bool(np.isclose(mean.stderr, x.std(ddof=1) / 3**0.5))
    (3.0, True)
    """
    rows = len(values) - 1
    value = float(values[0])
    if not np.isfinite(values).all() or (geometric and not (values > 0).all()):
        return Interval(value)
    scale = np.log(values) if geometric else values
    stderr = jackknife_stderr(scale[1:])
    reach = float(stdtrit(rows - 1, 0.975)) * stderr
    ends = (scale[0] - reach, scale[0] + reach)
    low, high = (float(np.exp(np.clip(end, -700, 700))) if geometric else float(end) for end in ends)
    return Interval(value, low, high, stderr)


class Estimate(NamedTuple):
    """A mean with its standard error, ``s / sqrt(n)`` where ``s`` is the sample standard deviation (n - 1).

    >>> print(Estimate.of([1.0, 2.0, 3.0]))
    2 ± 0.58 (n=3)
    """

    mean: float
    stderr: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Estimate the mean of independent values."""
        numbers = [float(value) for value in values]
        if not numbers or not all(map(math.isfinite, numbers)):
            raise InputError("values to average", numbers, "one or more finite numbers")
        n = len(numbers)
        stderr = statistics.stdev(numbers) / math.sqrt(n) if n > 1 else None
        return cls(statistics.fmean(numbers), stderr, n)

    @classmethod
    def crossed(cls, values: np.ndarray | Tensor) -> Self:
        """Estimate the mean of values [R, P] of R runs on the same P prompts; n is R.

        The squared standard error is that of the means over runs plus that of the means over prompts, so it holds for
        other runs *and* other prompts; what both share counts twice (Owen 2007, arXiv:0712.2060). One run has the error
        over prompts alone.

        >>> print(Estimate.crossed(np.array([[1.0, 3.0], [2.0, 6.0]])))     # sqrt(1 + 1.5^2)
        3 ± 1.8 (n=2)
        """
        values = np.asarray(values, dtype=float)
        errors = [cls.of(values.mean(axis)).stderr or 0.0 for axis in (0, 1)]
        return cls(float(values.mean()), math.hypot(*errors), len(values))

    def metrics(self, name: str) -> dict[str, float | int | None]:
        """Mean, standard error and n as flat metrics."""
        return {name: self.mean, f"{name}_stderr": self.stderr, f"{name}_n": self.n}

    def __str__(self) -> str:
        if self.stderr is None:
            return f"{self.mean:.4g} (n={self.n})"
        return f"{self.mean:.4g} ± {self.stderr:.2g} (n={self.n})"


def sketch(vector: Tensor, sums: int = 2**15) -> Tensor:
    """A vector [P] in fewer numbers [sums], so that inner products stay, in expectation (Charikar et al. 2002).

    Each entry goes to one of the sums with a random sign, the same for all vectors of a length. The standard deviation
    of a product is at most ``sqrt(2 / sums)`` times the product of both norms. Of P <= sums it is the vector itself.

    >>> x, y = torch.rand(2, 10**5, generator=torch.Generator().manual_seed(0))         # x . y is near 25,000
    >>> abs(float(sketch(x) @ sketch(y) - x @ y) / float(x.norm() * y.norm())) < 3 * (2 / 2**15) ** 0.5
    True
    """
    noise = torch.Generator().manual_seed(0)
    place = torch.randint(sums, vector.shape, generator=noise)
    sign = torch.randint(2, vector.shape, generator=noise, dtype=torch.int8) * 2 - 1
    small = torch.zeros(sums, dtype=vector.dtype)
    return small.index_add_(0, place, vector * sign) if len(vector) > sums else vector


class Moments(NamedTuple):
    """How good a gradient estimator is: four numbers, for all of R rows and with each left out in turn, arrays [1 + R].

    A sample has mean m and covariance C, the truth is mu. The mean of n samples has the squared error
    ``|m - mu|^2 + tr C / n`` and, with the root mean square for its norm, the expected cosine
    ``<m, mu> / (|mu| sqrt(|m|^2 + tr C / n))``. `jackknife_stderr` of the last R entries of any function of the four
    is its standard error.

    >>> rows = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]])       # products of different ones: 3, 2, 6
    >>> found = Moments.of(rows, torch.tensor([2.0, 0.0]))
    >>> [round(float(each[0]), 2) for each in (*found, found.bias2, found.mse)]     # tr C = 23/3 - 11/3
    [4.0, 3.67, 4.0, 4.0, -0.33, 3.67]
    """

    inner: np.ndarray  # ``<m, mu>``
    norm2: np.ndarray  # ``|m|^2``
    noise: np.ndarray  # ``tr C``, of one sample
    ref2: np.ndarray  # ``|mu|^2``

    @classmethod
    def of(cls, rows: Tensor, truth: Tensor, size: int = 1) -> Self:
        """Estimate them without bias from products of different rows, ``sum_{i != j} x_i . y_j / (R (R - 1))``.

        Args:
            rows: R independent gradients [R, P], each the mean of ``size`` samples; R is at least 3.
            truth: The exact gradient [P], or rows [R, P] of an unbiased estimator. Those may be paired with these, made
                from the same completions.
            size: Samples in a row.
        """
        sets = np.concatenate([np.ones((1, len(rows))), 1 - np.eye(len(rows))])  # [1 + R, R]: all, then all but one
        count = sets.sum(1)

        def products(x: Tensor, y: Tensor) -> np.ndarray:
            return (x.double() @ y.double().T).cpu().numpy()

        def different(of: np.ndarray) -> np.ndarray:
            return (((sets @ of) * sets).sum(1) - sets @ of.diagonal()) / (count * (count - 1))

        own, exact = products(rows, rows), truth.unsqueeze(0)
        norm2 = different(own)
        if truth.ndim == 1:
            inner = sets @ products(rows, exact)[:, 0] / count
            ref2 = np.full(len(sets), products(exact, exact)[0, 0])
        else:
            inner, ref2 = (different(products(x, truth)) for x in (rows, truth))
        return cls(inner, norm2, size * (sets @ own.diagonal() / count - norm2), ref2)

    @property
    def bias2(self) -> np.ndarray:
        """``|m - mu|^2``; an estimate without bias, so it may be negative."""
        return self.norm2 - 2 * self.inner + self.ref2

    @property
    def mse(self) -> np.ndarray:
        """Squared error of one sample."""
        return self.bias2 + self.noise

    def worth(self, unbiased: Moments) -> np.ndarray:
        """How many samples of an unbiased estimator have the expected cosine of one of these.

        With ``p = <m, mu> / (|m| |mu|)``, ``v = tr C / |m|^2`` and ``u = tr C_u / |mu|^2`` it is
        ``u p |p| / (1 - p^2 + v)``: negative where the estimator points away from the truth, infinite where noise makes
        the denominator negative. One of n samples is worth ``u p |p| / (n (1 - p^2) + v)``, less if there is bias.
        """
        along = self.inner * np.abs(self.inner)
        left = self.norm2 * self.ref2 - self.inner**2 + self.noise * self.ref2
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(left > 0, unbiased.noise * along / (left * self.ref2), np.inf)

    def crossover(self, unbiased: Moments) -> np.ndarray:
        """The n at which one of n samples is worth 1, ``(u p^2 - v) / (1 - p^2)``; beyond, the unbiased one is better.

        0 if it is better for every n, infinite if for none.
        """
        along = np.clip(self.inner, 0, None) ** 2
        gain = unbiased.noise * along / self.ref2 - self.noise * self.ref2
        loss = self.norm2 * self.ref2 - along
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(gain <= 0, 0.0, np.where(loss > 0, gain / loss, np.inf))
