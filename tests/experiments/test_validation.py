"""The validation itself: small runs of what its notebook shows, and that a broken estimator would be seen."""

import pytest

from grade.experiments.enumeration import random_direction, random_prompts, tiny_policy
from grade.experiments.validation.measure import study as validation
from grade.experiments.validation.metrics import slope


@pytest.fixture(scope="module")
def policy():
    return tiny_policy()


def test_every_way_of_predicting_has_slope_one_and_meets_the_truth(policy):
    prompts, vector = random_prompts(policy, 2), random_direction(policy)
    assert float(vector.norm()) == pytest.approx(1)
    table = validation.first_order_table(policy, prompts, 2, vector, [1e-4, 1e-5, 1e-6])
    for way in ("forward", "reverse", "two_batch"):
        assert slope(table, way) == pytest.approx(1, abs=0.02)
        assert abs(table[way].iloc[-1] / table.exact.iloc[-1] - 1) <= 1e-4
    wrong = table.assign(forward=table.forward**2)
    assert slope(wrong, "forward") == pytest.approx(2, abs=0.04)


def test_the_u_statistic_is_unbiased_over_draws_of_prompts_and_completions(policy):
    found = validation.coverage(policy, 2, batch=8, group=16, repetitions=200, pool=4)
    assert abs(found["mean"] - found["truth"]) < 4 * found["stderr"]
    assert 0.8 < found["plug_in"] <= found["jackknife"] <= 1


def test_importance_sampling_is_unbiased_while_enough_samples_count(policy):
    prompts, vector = random_prompts(policy, 2), random_direction(policy)
    table = validation.importance_table(policy, prompts, 2, vector, [0.1], group=64, repetitions=20)
    assert table.way.tolist() == ["whole", "prefix"]
    for row in table.itertuples():
        assert abs(row.mean - row.exact) < 4 * row.bias_stderr and 0.5 < row.ess <= 1
