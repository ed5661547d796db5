"""A step traced and run: on a CPU, and the rows of a GPU, whose measuring is stood in for."""

import pytest

from grade.experiments.bench import bench_figures, compare_with_real
from grade.memory.settings import StepConfig

STEP = StepConfig(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=2, gumbel_topk=8)
NAMES = ["predicted_live_bytes", "predicted_reserved_bytes", "measured_allocated_bytes", "measured_reserved_bytes"]


def test_a_comparison_says_how_far_a_prediction_is(capsys):
    (row,) = compare_with_real([STEP], "cpu")
    assert row["traced_over_measured"] == row["traced_peak_bytes"] / row["measured_peak_bytes"]
    assert len(capsys.readouterr().out.splitlines()) == 1 and not set(NAMES) & set(row)
    figures = bench_figures([row, row | {"traced_over_measured": 0.9}], "cpu", time_traces=False)
    assert figures == {"cpu/steps": 2, "cpu/max_rel_error": pytest.approx(0.1)}
