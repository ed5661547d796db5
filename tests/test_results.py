"""Result files: rounding, nesting, refusal of what is not finite, and replacement in one step."""

import math
import os

import pytest
import torch

from grade.errors import InputError
from grade.results import read_metrics, write_history, write_metrics
from grade.stats import Estimate


def test_metrics_are_nested_sorted_and_rounded_to_six_digits(tmp_path):
    path = tmp_path / "new" / "metrics.json"
    write_metrics(path, {"train/ste/kl": 1 / 3, "n": 256, "train/ste/big": 123456789.0, "a/ok": True, "a/none": None})
    assert path.read_text() == (
        '{\n  "a": {\n    "none": null,\n    "ok": true\n  },\n  "n": 256,\n'
        '  "train": {\n    "ste": {\n      "big": 123457000.0,\n      "kl": 0.333333\n    }\n  }\n}\n'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1], torch.tensor(math.nan)])
def test_a_value_that_is_no_finite_number_is_refused_and_the_old_file_stays(tmp_path, value):
    metrics, history = tmp_path / "metrics.json", tmp_path / "history.csv"
    write_metrics(metrics, {"kl": 1})
    write_history(history, [{"kl": 1}])
    with pytest.raises(InputError, match="val/kl"):
        write_metrics(metrics, {"val/kl": value})
    with pytest.raises(InputError, match="val/kl"):
        write_history(history, [{"step": 0}, {"val/kl": value}])
    assert read_metrics(metrics) == {"kl": 1} and history.read_text() == "kl\n1\n"
    assert sorted(os.listdir(tmp_path)) == ["history.csv", "metrics.json"]


def test_history_has_columns_as_first_seen_and_empty_fields(tmp_path):
    path = tmp_path / "history.csv"
    write_history(path, [{"step": 0, "loss": 0.12345678}, {"step": 1, "loss": 2.0, "val": 1e-9}])
    assert path.read_bytes() == b"step,loss,val\n0,0.123457,\n1,2.0,1e-09\n"


def test_estimate_by_hand():
    # mean 2; squared deviations 1 + 0 + 1 = 2; s^2 = 2 / (3 - 1) = 1; stderr = 1 / sqrt(3)
    assert Estimate.of(torch.tensor([1.0, 2.0, 3.0])) == (2.0, pytest.approx(1 / math.sqrt(3)), 3)
    assert Estimate.of([0.5]) == (0.5, None, 1)
    assert str(Estimate.of([0.5])) == "0.5 (n=1)"


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_estimate_of_nothing_or_nan_is_refused(values):
    with pytest.raises(InputError, match="values to average"):
        Estimate.of(values)
