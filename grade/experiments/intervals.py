"""Intervals of statistics over rows."""

from typing import NamedTuple

import numpy as np
from scipy.stats import t as student

from grade.stats import jackknife_stderr


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
