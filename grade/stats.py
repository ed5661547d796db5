"""Means and jackknife estimates with their standard errors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np
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
