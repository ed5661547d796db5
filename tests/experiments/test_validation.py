"""The validation itself: small runs of what its notebook shows, and that a broken estimator would be seen."""

import pytest

from grade.experiments.validation.measure.tables import TABLES, Settings
from grade.experiments.validation.metrics import slope


def test_every_way_of_predicting_has_slope_one_and_meets_the_truth():
    settings = Settings(completion_tokens=2)
    assert float(settings.subject[-1].norm()) == pytest.approx(1)
    table = TABLES["first_order"](settings)
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
    settings = Settings(completion_tokens=2, importance_etas=[0.1], importance_repetitions=20)
    table = TABLES["importance"](settings)
    assert table.way.tolist() == ["whole", "prefix"]
    for row in table.itertuples():
        assert abs(row.mean - row.exact) < 4 * row.bias_stderr and 0.5 < row.ess <= 1
