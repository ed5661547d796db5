"""A step traced and run: on a CPU, and the rows of a GPU, whose measuring is stood in for."""

import pytest

from grade.memory import bench
from grade.memory.allocator import WORKSPACE, WORKSPACE_HOPPER, reserved_by
from grade.memory.bench import bench_figures, compare_with_real
from grade.memory.settings import StepConfig
from grade.memory.trace import trace

STEP = StepConfig(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=2, gumbel_topk=8)
NAMES = ["predicted_live_bytes", "predicted_reserved_bytes", "measured_allocated_bytes", "measured_reserved_bytes"]


def test_a_comparison_says_how_far_a_prediction_is():
    lines = []
    (row,) = compare_with_real([STEP], "cpu", log=lines.append)
    assert row["traced_over_measured"] == row["traced_peak_bytes"] / row["measured_peak_bytes"]
    assert len(lines) == 1 and not set(NAMES) & set(row)
    figures = bench_figures([row, row | {"traced_over_measured": 0.9}], "cpu", time_traces=False)
    assert figures == {"cpu/steps": 2, "cpu/max_rel_error": pytest.approx(0.1)}


@pytest.mark.parametrize(("capability", "workspace"), [((8, 0), WORKSPACE), ((9, 0), WORKSPACE_HOPPER)])
@pytest.mark.parametrize("measured", [dict(measured_peak_bytes=2**20, reserved_bytes=2**24), dict(out_of_memory=True)])
def test_a_step_on_cuda_has_four_numbers_or_those_that_there_are(monkeypatch, measured, capability, workspace):
    monkeypatch.setattr(bench, "measure", lambda *_: measured)
    monkeypatch.setattr(bench.torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(bench.torch.cuda, "empty_cache", lambda: None)
    (row,) = compare_with_real([STEP], "cuda", log=lambda line: None)
    predicted = [trace(STEP).peak, reserved_by(STEP, workspace=workspace).reserved]
    assert [row[name] for name in NAMES[:2]] == predicted
    assert [row[name] for name in NAMES[2:]] == [measured.get("measured_peak_bytes"), measured.get("reserved_bytes")]
    # 2 MiB for what is small, 20 or more for cuBLAS' workspace: a model of 1 MiB has no tensor of more than 1 MiB.
    assert predicted[1] == (22 if workspace == WORKSPACE else 34) * 2**20
