"""Steps that run for real beside their traces."""

import pytest

from grade.memory.compare import compare, standard_steps


def test_a_row_has_the_traced_peak_and_that_of_the_step_that_ran():
    steps = standard_steps("cpu")
    assert len(steps) == 13 and len(standard_steps("cuda")) == 17
    (row,) = compare(steps[8:9])
    assert (row["name"], row["config"]["method"]) == (steps[8].headline, "gumbel_legacy")
    assert 0 < row["fixed_bytes"] < row["traced_peak_bytes"]
    assert row["measured_peak_bytes"] == pytest.approx(row["traced_peak_bytes"], rel=0.01) and row["seconds"] > 0
