"""Slope, R2 and what is kept of them, by hand."""

import math

import pytest
import torch

from grade.gradients.distilled.ridge import Choice, Spectrum, calibrated, centred, choose


def test_slope_and_r2_by_hand():
    """p = (1, -1 | 2, -2) and y = (2, -2 | 2, -2), three times: sum py = 36, sum pp = 30, sum yy = 48.

    Slope 1.2; R2 = 36^2 / (30 * 48) = 0.9. What is left of y is (.8, -.8 | -.4, .4), times p and summed by groups 1.6
    and -1.6: the error is sqrt(6 * 1.6^2) / 30. Groups have shares 2/30 and 8/30 of sum pp, so m = 900 / 204 decide.
    """
    p, y = torch.tensor([[1.0, -1, 2, -2] * 3, [2, -2, 2, -2] * 3], dtype=torch.float64)
    r2, slope, stderr = calibrated(p, y, 2)
    m = 900 / 204
    assert (r2, slope) == pytest.approx((0.9, 1.2))
    assert stderr == pytest.approx(math.sqrt(15.36 * m / (m - 3)) / 30)
    assert calibrated(p[:4], y[:4], 2) == pytest.approx((0.9, 1.2, math.inf)), "two groups show nothing"
    residual = y - slope * p
    assert r2 == pytest.approx(1 - float(residual @ residual / (y @ y)))
    assert calibrated(-p, y, 2) == pytest.approx((-0.9, -1.2, stderr)), "the wrong way: negative"
    assert calibrated(0 * p, y, 2) == calibrated(p, 0 * y, 2) == (0.0, 0.0, math.inf)


def test_what_a_choice_keeps_of_its_slope_by_hand():
    """Slope 2 with error 1: a shrinkage of 1 - 1/4."""
    choice = Choice(0.1, 0.4, 2.0, 1.0)
    assert (choice.shrinkage, choice.slope) == pytest.approx((0.75, 1.5))
    for nothing in (Choice(0.1, 0.4, 1.0, 1.0), Choice(0.1, -0.4, -2.0, 0.1), Choice(10.0, 0.0, 0.0, math.inf)):
        assert (nothing.shrinkage, nothing.slope) == (0.0, 0.0)


def test_groups_without_a_token_in_common_predict_nothing():
    """What is left of their predictions is rounding, which is not to be divided by."""
    x = centred(torch.eye(8, dtype=torch.float64).repeat(1, 3) * torch.linspace(0.1, 7, 24), 4)
    for first in range(8):
        y = centred((torch.arange(8) == first).double(), 4)
        choice = choose(Spectrum.of(x @ x.T), y, 4)
        assert (choice.raw_slope, choice.slope, choice.r2) == (0.0, 0.0, 0.0)
