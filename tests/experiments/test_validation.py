"""The validation itself: small runs of what its notebook shows, and that a broken estimator would be seen."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.experiments.validation.measure.tables import TABLES, Settings, u_statistic
from grade.experiments.validation.metrics import slope


def test_every_way_of_predicting_has_slope_one_and_meets_the_truth():
    small = Settings(completion_tokens=2)
    assert float(small.subject[-1].norm()) == pytest.approx(1)
    table = TABLES["first_order"](small)
    for way in ("forward", "reverse", "two_batch"):
        assert slope(table, way) == pytest.approx(1, abs=0.02)
        assert abs(table[way].iloc[-1] / table.exact.iloc[-1] - 1) <= 1e-4
    wrong = table.assign(forward=table.forward**2)
    assert slope(wrong, "forward") == pytest.approx(2, abs=0.04)


def test_the_u_statistic_is_unbiased_over_draws_of_prompts_and_completions():
    sizes = dict(coverage_prompts=[8], coverage_group=16, coverage_pool=4, repetitions=200)
    row = TABLES["coverage"](Settings(completion_tokens=2, **sizes)).iloc[0]
    assert abs(row["mean"] - row.truth) < 4 * row.stderr
    assert 0.8 < row.plug_in <= row.jackknife <= 1


def test_importance_sampling_is_unbiased_while_enough_samples_count():
    small = Settings(completion_tokens=2, importance_etas=[0.1], importance_repetitions=20)
    table = TABLES["importance"](small)
    assert table.way.tolist() == ["whole", "prefix"]
    for row in table.itertuples():
        assert abs(row.mean - row.exact) < 4 * row.bias_stderr and 0.5 < row.ess <= 1


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 7), st.integers(1, 4), st.integers(0, 1000))
def test_the_u_statistic_is_the_mean_over_pairs(batch, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, batch, width, generator=generator, dtype=torch.float64)

    def brute_force(rows):
        return float(np.mean([x[i] @ y[j] for i in rows for j in rows if i != j]))

    value, stderrs = u_statistic(x, y)
    assert value == pytest.approx(brute_force(range(batch)), abs=1e-10)
    # Leaving out a prompt is the U-statistic of the others.
    without = np.array([brute_force([j for j in range(batch) if j != i]) for i in range(batch)])
    assert stderrs["jackknife"] == pytest.approx(np.sqrt((batch - 1) * without.var()), abs=1e-9)
