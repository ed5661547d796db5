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

    def metrics(self, name: str) -> dict[str, float | int | None]:
        """Mean, standard error and n as flat metrics."""
        return {name: self.mean, f"{name}_stderr": self.stderr, f"{name}_n": self.n}

    def __str__(self) -> str:
        if self.stderr is None:
            return f"{self.mean:.4g} (n={self.n})"
        return f"{self.mean:.4g} ± {self.stderr:.2g} (n={self.n})"
