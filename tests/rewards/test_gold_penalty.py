"""The judge's L2 penalty: its weights solve the regression with the C that is asked for, 3 by default."""

import numpy as np
import pytest
from scipy.special import expit

from grade.rewards.gold import GoldJudge

TEXTS = ["a superb film", "a moving film", "superb and moving", "a dull film", "a clumsy film", "dull and clumsy"]
LABELS = np.array([1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize(("options", "c"), [({}, 3.0), ({"c": 0.5}, 0.5), ({"c": 10.0}, 10.0)])
def test_the_gradient_of_the_penalised_likelihood_vanishes(options, c):
    judge = GoldJudge.fit(TEXTS, LABELS.tolist(), n_crops=0, **options)
    rows = judge.vectorizer.transform(TEXTS).toarray()
    left = LABELS - expit(rows @ judge.coef + judge.intercept)
    # Minimum of |w|^2 / 2 + b^2 / 2 + C sum log(1 + exp(-y f)): w = C X^T (y - p). The solver stops at a gradient of
    # 1e-4 of the first one; another C is off by its ratio.
    assert np.abs(judge.coef - c * rows.T @ left).max() <= 1e-2 * np.abs(judge.coef).max()
    assert judge.intercept == pytest.approx(c * left.sum(), abs=1e-2)
