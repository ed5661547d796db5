"""Moments of gradient estimators on Gaussians whose truth is known, float64."""

import math

import numpy as np
import pytest
import torch

from grade.stats import Moments, interval

P = 200
MU = torch.zeros(P, dtype=torch.float64)
MU[0] = 2.0  # |mu|^2 = 4
BIASED = torch.zeros(P, dtype=torch.float64)
BIASED[:2] = torch.tensor([1.5, 2.0])  # <m, mu> = 3, |m|^2 = 6.25: cosine of the means 0.6
RELAXED, PG = (Moments(*np.array(four)[:, None]) for four in ((3, 6.25, 20.0, 4), (4, 4, 200.0, 4)))


def draw(rows, size, seed, mean=BIASED):
    """Rows of an unbiased estimator and of a biased one, noise 1 and 0.3 a coordinate and 0.1 of the former's."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, rows, P, generator=generator, dtype=torch.float64) / math.sqrt(size)
    return MU + noise[0], mean + 0.3 * noise[1] + 0.1 * noise[0]


@pytest.mark.parametrize("exact", [True, False])
def test_moments_are_unbiased_whether_the_truth_is_known_or_estimated(exact):
    """400 experiments of 6 rows: means of all four numbers within 4 standard errors of the truth."""
    values = []
    for seed in range(400):
        pg, relaxed = draw(6, 10, seed)
        m = Moments.of(relaxed, MU if exact else pg, 10)
        values.append([m.inner[0], m.norm2[0], m.noise[0], m.ref2[0], m.bias2[0]])
    values = np.array(values)
    truth = np.array([3, 6.25, 18 + 2, 4, 6.25 - 6 + 4])
    assert (np.abs(values.mean(0) - truth) <= 4 * values.std(0) / 20 + 1e-12).all()


@pytest.mark.parametrize("exact", [True, False])
def test_each_row_is_left_out_in_turn(exact):
    pg, relaxed = draw(5, 10, 0)
    every = np.array(Moments.of(relaxed, MU if exact else pg, 10))
    for row in range(5):
        left = [i for i in range(5) if i != row]
        want = np.array(Moments.of(relaxed[left], MU if exact else pg[left], 10))[:, 0]
        np.testing.assert_allclose(every[:, 1 + row], want)


def test_worth_and_crossover_by_hand():
    """p^2 = 0.36, v = 20 / 6.25 = 3.2, u = 200 / 4 = 50: one of n is worth 18 / (0.64 n + 3.2), so 1 at 14.8 / 0.64."""

    def cosine(m, n):
        return m.inner[0] / math.sqrt(m.ref2[0] * (m.norm2[0] + m.noise[0] / n))

    worth, n = RELAXED.worth(PG)[0], RELAXED.crossover(PG)[0]
    assert worth == pytest.approx(18 / 3.84) and n == pytest.approx(14.8 / 0.64)
    assert cosine(RELAXED, 1) == pytest.approx(cosine(PG, worth)) and cosine(RELAXED, n) == pytest.approx(cosine(PG, n))
    # The unbiased one against itself; less noise is never overtaken; away from the truth worth is negative.
    less, away = Moments(*PG[:2], PG.noise / 2, PG.ref2), Moments(-RELAXED.inner, *RELAXED[1:])
    assert PG.worth(PG)[0] == pytest.approx(1) and away.worth(PG)[0] == pytest.approx(-worth)
    assert less.crossover(PG)[0] == math.inf and PG.crossover(less)[0] == away.crossover(PG)[0] == 0


def test_intervals_of_worth_hold_the_truth_as_often_as_they_say():
    """300 experiments of 24 rows of 50 samples; binomial sd of a coverage of 0.95 is 0.013. At right angles worth is 0.

    There the signed root is nearly normal, and a cosine that is estimated as negative counts.
    """
    hits, zeros, highs = 0, 0, []
    nothing = torch.zeros(P, dtype=torch.float64)
    nothing[5] = 2.0
    for seed in range(300):
        pg, relaxed = draw(24, 50, seed)
        base = Moments.of(pg, pg, 50)
        found = interval(Moments.of(relaxed, pg, 50).worth(base), geometric=True)
        hits += found.low <= 18 / 3.84 <= found.high
        worth = Moments.of(draw(24, 50, 10_000 + seed, nothing)[1], pg, 50).worth(base)
        root = interval(np.sign(worth) * np.sqrt(np.abs(worth)))
        zeros += root.low <= 0 <= root.high
        highs.append(root.high**2)
    assert 0.90 <= hits / 300 <= 0.99 and 0.90 <= zeros / 300 <= 0.99 and max(highs) < 1
