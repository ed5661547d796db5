"""Four numbers of a step on CUDA: what is written of steps that ran, that ran out of memory, and on a CPU."""

import pytest

from grade.memory import bench
from grade.memory.allocator import WORKSPACE, WORKSPACE_HOPPER, Replay
from grade.memory.bench import bench_figures, compare, four_numbers
from grade.memory.step import StepConfig
from grade.memory.trace import trace

STEP = StepConfig(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=2, gumbel_topk=8)
NAMES = ["predicted_live_bytes", "predicted_reserved_bytes", "measured_allocated_bytes", "measured_reserved_bytes"]
PREDICTED = Replay(live=10, allocated=11, reserved=20)


@pytest.mark.parametrize(
    ("row", "predicted", "numbers"),
    [
        (dict(measured_peak_bytes=12, reserved_bytes=22), PREDICTED, [10, 20, 12, 22]),
        (dict(out_of_memory=True), PREDICTED, [10, 20, None, None]),
        (dict(measured_peak_bytes=12), None, [10, None, None, None]),  # a CPU's peak is not an allocator's
    ],
)
def test_what_was_not_measured_is_empty(row, predicted, numbers):
    found = four_numbers({"traced_peak_bytes": 10} | row, predicted)
    assert (list(found), list(found.values())) == (NAMES, numbers)


def test_a_step_on_a_cpu_has_none_of_them(monkeypatch):
    (row,) = compare([STEP], "cpu", log=lambda line: None)
    assert not set(NAMES) & set(row)


def test_a_step_on_cuda_has_all_four(monkeypatch):
    """The measuring is stood in for: there may be no GPU."""
    monkeypatch.setattr(bench, "measure", lambda *_: {"measured_peak_bytes": 2**20, "reserved_bytes": 22 * 2**20})
    monkeypatch.setattr(bench.torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(bench.torch.cuda, "empty_cache", lambda: None)
    (row,) = compare([STEP], "cuda", log=lambda line: None)
    # 2 MiB for what is small, 20 for cuBLAS' workspace: a model of 1 MiB has no tensor of more than 1 MiB.
    assert [row[name] for name in NAMES] == [trace(STEP).peak, 22 * 2**20, 2**20, 22 * 2**20]
    assert bench.workspace_bytes() == WORKSPACE
    monkeypatch.setattr(bench.torch.cuda, "get_device_capability", lambda: (9, 0))
    assert bench.workspace_bytes() == WORKSPACE_HOPPER


def test_a_comparison_says_how_far_a_prediction_is():
    step = STEP
    lines = []
    (row,) = compare([step], "cpu", log=lines.append)
    assert row["traced_over_measured"] == row["traced_peak_bytes"] / row["measured_peak_bytes"]
    figures = bench_figures([row, row | {"traced_over_measured": 0.9}], "cpu", time_traces=False)
    assert figures == {"cpu/steps": 2, "cpu/max_rel_error": pytest.approx(0.1)}
    assert len(lines) == 1
