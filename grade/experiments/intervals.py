"""Paired comparisons over seeds."""

from collections.abc import Mapping

from scipy.stats import t as student

from grade.errors import InputError
from grade.stats import Estimate


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
