"""Ridge on groups against fits that are really made again without each group, and numbers by hand."""

import math

import pytest
import torch

from grade.gradients.distilled.ridge import Choice, Spectrum, calibrated, centred, choose, coefficients, left_out

GROUP = 3


def data(groups=7, size=5, group=GROUP, seed=0, noise=0.3):
    """Centred features [n, F] and rewards [n] that are partly linear in them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups * group, size, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(size, generator=generator, dtype=torch.float64)
    y = y + noise * torch.randn(len(x), generator=generator, dtype=torch.float64)
    return centred(x, group), centred(y, group)


def refit(x, y, penalty):
    """Weights of ridge regression by its normal equations in the features, not in the completions."""
    return torch.linalg.solve(x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y)


def without(n, number, group=GROUP):
    """Rows of all groups but one."""
    return [i for i in range(n) if i // group != number]


@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("penalty", [0.01, 3.0])
def test_predictions_are_those_of_fits_made_again_without_each_group(group, penalty):
    x, y = data(group=group)
    want = torch.zeros(len(y), dtype=torch.float64)
    for number in range(len(y) // group):
        rest = without(len(y), number, group)
        own = slice(number * group, (number + 1) * group)
        want[own] = x[own] @ refit(x[rest], y[rest], penalty)
    got = left_out(Spectrum.of(x @ x.T), y, group, penalty)
    assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    seen = x @ refit(x, y, penalty)
    assert (got - seen).abs().max() > 1e-3 * want.abs().max(), "a fit that has seen the group says something else"


def test_coefficients_are_those_of_fits_made_again():
    x, y = data()
    gram, penalty, numbers = x @ x.T, 0.3, (6, 0, 3)  # one penalty, also for the fits that have fewer rows
    got = coefficients(gram, y, GROUP, penalty, numbers)
    assert got.shape == (4, len(y))
    for row, rest in zip(got, [list(range(len(y))), *(without(len(y), number) for number in numbers)], strict=True):
        weights = refit(x[rest], y[rest], penalty)
        assert (row @ x - weights).abs().max() <= 1e-10 * weights.abs().max()
        alpha = torch.linalg.solve(gram[rest][:, rest] + penalty * torch.eye(len(rest), dtype=x.dtype), y[rest])
        assert (row[rest] - alpha).abs().max() <= 1e-10 * alpha.abs().max()
        left = [i for i in range(len(y)) if i not in rest]
        assert not row[left].any(), "exactly 0: what the fit has not seen must not enter by rounding"
    assert torch.equal(coefficients(gram, y, GROUP, penalty, ()), got[:1])


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
    """Slope 2 with error 1: a shrinkage of 1 - 1/4. Explained is the root of R2."""
    choice = Choice(0.1, 0.4, 2.0, 1.0)
    assert (choice.shrinkage, choice.slope, choice.explained) == pytest.approx((0.75, 1.5, math.sqrt(0.4)))
    for nothing in (Choice(0.1, 0.4, 1.0, 1.0), Choice(0.1, -0.4, -2.0, 0.1), Choice(10.0, 0.0, 0.0, math.inf)):
        assert (nothing.shrinkage, nothing.slope) == (0.0, 0.0)
    assert Choice(0.1, -0.4, -2.0, 0.1).explained == 0.0


def test_groups_without_a_token_in_common_predict_nothing():
    """What is left of their predictions is rounding, which is not to be divided by."""
    x = centred(torch.eye(8, dtype=torch.float64).repeat(1, 3) * torch.linspace(0.1, 7, 24), 4)
    for first in range(8):
        y = centred((torch.arange(8) == first).double(), 4)
        choice = choose(Spectrum.of(x @ x.T), y, 4)
        assert (choice.raw_slope, choice.slope, choice.r2) == (0.0, 0.0, 0.0)
