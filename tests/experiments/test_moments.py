"""Statistics of gradients on Gaussians whose truth is known, float64."""

import math

import numpy as np
import pytest
import torch

from grade.errors import InputError
from grade.experiments import moments as quality

P = 200
MU = torch.zeros(P, dtype=torch.float64)
MU[0] = 2.0  # |mu|^2 = 4
BIASED = torch.zeros(P, dtype=torch.float64)
BIASED[:2] = torch.tensor([1.5, 2.0])  # <m, mu> = 3, |m|^2 = 6.25: cosine of the means 0.6
SD_PG, SD_RELAXED, SHARED = 1.0, 0.3, 0.1  # per coordinate: tr C = 200, 18 + 2 (shared noise), cross 200 * 0.1


def draw(rows, size=1, seed=0):
    """Rows of an unbiased and a biased estimator whose noise is correlated."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, rows, P, generator=generator, dtype=torch.float64) / math.sqrt(size)
    return MU + SD_PG * noise[0], BIASED + SD_RELAXED * noise[1] + SHARED * noise[0]


def of(*values):
    """Moments without a row left out."""
    return quality.Moments(*np.array(values)[:, None])


def test_moments_by_hand():
    rows = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]], dtype=torch.float64)
    found = quality.moments(rows, torch.tensor([2.0, 0.0], dtype=torch.float64), size=5)
    # Products of different rows: 3, 2, 6, so |m|^2 = 11/3; squares 1, 9, 13, mean 23/3; tr C of a row = 4.
    assert found.norm2[0] == pytest.approx(11 / 3) and found.noise[0] == pytest.approx(5 * 4)
    assert found.inner[0] == pytest.approx(4) and found.ref2[0] == 4  # mean of 2, 6, 4
    assert found.bias2[0] == pytest.approx(11 / 3 - 8 + 4) and found.mse(5)[0] == pytest.approx(11 / 3 - 8 + 4 + 4)
    assert found.norm2[1:].tolist() == pytest.approx([6, 2, 3])  # each row left out
    assert found.cosine(20)[0] == pytest.approx(4 / math.sqrt(4 * (11 / 3 + 1)))


@pytest.mark.parametrize("exact", [True, False])
def test_moments_are_unbiased_whether_the_truth_is_known_or_estimated(exact):
    """400 experiments of 6 rows: means of all four numbers within 4 standard errors of the truth."""
    values = []
    for seed in range(400):
        pg, relaxed = draw(6, size=10, seed=seed)
        m = quality.moments(relaxed, MU if exact else pg, size=10)
        values.append([m.inner[0], m.norm2[0], m.noise[0], m.ref2[0], m.bias2[0]])
    values = np.array(values)
    truth = np.array([3, 6.25, 18 + 2, 4, 6.25 - 6 + 4])
    assert (np.abs(values.mean(0) - truth) <= 4 * values.std(0) / 20 + 1e-12).all()


def test_cosine_is_the_simulated_one():
    """Mean cosine of 2,000 simulated averages over n = 10; with 200 coordinates norms vary by a few per cent."""
    relaxed = draw(2000, size=10, seed=1)[1]
    simulated = torch.cosine_similarity(relaxed, MU.unsqueeze(0)).mean()
    truth = of(3.0, 6.25, 20.0, 4.0)
    assert truth.cosine(10)[0] == pytest.approx(float(simulated), rel=0.01)
    # And exactly: 1 - cos^2 is the squared error at the best scale, relative to |mu|^2.
    s = 3.0 / (6.25 + 2.0)
    assert 1 - truth.cosine(10)[0] ** 2 == pytest.approx((s**2 * (6.25 + 2.0) - 2 * s * 3.0 + 4) / 4)


def test_worth_and_crossover_by_hand():
    """p^2 = 0.36, v = 20 / 6.25 = 3.2, u = 200 / 4 = 50: worth(n) = 18 / (0.64 n + 3.2), so 1 at 14.8 / 0.64."""
    relaxed = of(3.0, 6.25, 20.0, 4.0)
    pg = of(4.0, 4.0, 200.0, 4.0)
    for n in (0, 1, 50):
        assert quality.worth(relaxed, pg, n)[0] == pytest.approx(18 / (0.64 * n + 3.2))
    n = quality.crossover(relaxed, pg)[0]
    assert n == pytest.approx(14.8 / 0.64)
    assert quality.worth(relaxed, pg, n)[0] == pytest.approx(1)
    assert relaxed.cosine(n)[0] == pytest.approx(pg.cosine(n)[0])
    assert relaxed.cosine(7)[0] == pytest.approx(pg.cosine(7 * quality.worth(relaxed, pg, 7)[0])[0])
    # The unbiased one against itself; less noise is never overtaken; away from the truth nothing is worth anything.
    assert quality.worth(pg, pg, 3)[0] == pytest.approx(1)
    less = of(4.0, 4.0, 100.0, 4.0)
    assert quality.crossover(less, pg)[0] == math.inf and quality.crossover(pg, less)[0] == 0
    away = of(-1.0, 6.25, 20.0, 4.0)
    assert quality.worth(away, pg)[0] == 0 and quality.crossover(away, pg)[0] == 0


def test_intervals_of_worth_hold_the_truth_as_often_as_they_say():
    """300 experiments of 24 rows of 50 samples; binomial sd of a coverage of 0.95 is 0.013."""
    hits = 0
    for seed in range(300):
        pg, relaxed = draw(24, size=50, seed=seed)
        found = quality.worth_interval(quality.moments(relaxed, pg, 50), quality.moments(pg, pg, 50))
        hits += found.low <= 18 / 3.84 <= found.high
    assert 0.90 <= hits / 300 <= 0.99


def test_intervals_of_worth_hold_nothing_as_well():
    """A relaxed gradient at right angles to the truth is worth 0: the interval reaches it, and not far beyond."""
    hits, highs = 0, []
    for seed in range(300):
        pg, relaxed = draw(24, size=50, seed=seed)
        generator = torch.Generator().manual_seed(10_000 + seed)
        relaxed = relaxed - BIASED + torch.randn(24, P, generator=generator, dtype=torch.float64) / 7
        relaxed[:, 5] += 2.0
        found = quality.worth_interval(quality.moments(relaxed, pg, 50), quality.moments(pg, pg, 50))
        hits += found.low == 0
        highs.append(found.high)
    assert 0.94 <= hits / 300 <= 1 and max(highs) < 1  # one-sided 97.5 %


def test_a_sketch_keeps_inner_products_in_expectation():
    x, y = torch.randn(2, 500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = np.array([float((lambda s: s(x) @ s(y))(quality.sketch(500, 64, seed))) for seed in range(500)])
    assert abs(values.mean() - float(x @ y)) < 4 * values.std() / math.sqrt(500)
    assert values.std() == pytest.approx(float(x.norm() * y.norm()) / 8, rel=0.2)  # 1 / sqrt(64)
    assert quality.sketch(500, 500)(x) is x


def test_bad_rows_are_named():
    rows = torch.zeros(4, 3)
    for bad, message in (
        (lambda: quality.moments(rows, rows[:3]), "reference gradient"),
        (lambda: quality.moments(rows * math.nan, rows[0]), "repeated gradients: got 'NaN or infinity'"),
    ):
        with pytest.raises(InputError, match=message):
            bad()
