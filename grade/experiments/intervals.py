"""Intervals of statistics over rows, and paired comparisons over seeds."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from grade.errors import InputError
from grade.stats import Estimate, jackknife_stderr


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> tuple[Estimate, float | None]:
    """The mean of ``a - b`` on the seeds that both have, and two-sided p of the paired t-test (None: nothing varies).

    >>> difference, p = paired({0: 1.0, 1: 2.0, 2: 6.0}, {0: 0.0, 1: 0.0, 2: 3.0})
    >>> print(difference, round(p, 3))                     # t = 2 / 0.577
    2 ± 0.58 (n=3) 0.074
    """
    seeds = sorted(set(a) & set(b))
    if len(seeds) < 2:
        raise InputError("seeds of both methods", seeds, "at least two, to have a standard error")
    difference = Estimate.of(a[s] - b[s] for s in seeds)
    if not difference.stderr:
        return difference, None
    return difference, float(2 * student.sf(abs(difference.mean / difference.stderr), len(seeds) - 1))


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
    reach = float(student.ppf(0.975, rows - 1)) * stderr
    ends = (scale[0] - reach, scale[0] + reach)
    low, high = (float(np.exp(np.clip(end, -700, 700))) if geometric else float(end) for end in ends)
    return Interval(value, low, high, stderr)
