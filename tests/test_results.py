"""Result files: rounding, nesting, refusal of what is not finite, and replacement in one step."""

import json
import math
import os
import subprocess

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.errors import InputError
from grade.results import environment, read_metrics, write_history, write_metrics
from grade.stats import Estimate


def test_metrics_are_nested_sorted_and_rounded_to_six_digits(tmp_path):
    path = tmp_path / "new" / "metrics.json"
    write_metrics(path, {"train/ste/kl": 1 / 3, "n": 256, "train/ste/big": 123456789.0, "a/ok": True, "a/none": None})
    assert path.read_text() == (
        '{\n  "a": {\n    "none": null,\n    "ok": true\n  },\n  "n": 256,\n'
        '  "train": {\n    "ste": {\n      "big": 123457000.0,\n      "kl": 0.333333\n    }\n  }\n}\n'
    )


def test_scalars_of_numpy_and_torch_are_plain_numbers(tmp_path):
    write_metrics(tmp_path / "m.json", {"a": np.float32(0.5), "b": torch.tensor(2), "c": np.bool_(True)})
    assert json.loads((tmp_path / "m.json").read_text()) == {"a": 0.5, "b": 2, "c": True}


names = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=3).map("/".join)
values = st.none() | st.booleans() | st.integers() | st.text('é"/\n') | st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=50)  # each example writes a file: its time is the disk's
@given(st.dictionaries(names, values, max_size=6))
def test_metrics_read_back_what_was_written(tmp_path_factory, flat):
    path = tmp_path_factory.mktemp("m") / "metrics.json"
    levels = {name.rsplit("/", i)[0] for name in flat for i in range(1, name.count("/") + 1)}
    flat = {name: value for name, value in flat.items() if name not in levels}  # no number is also a level
    write_metrics(path, flat)
    expected = {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in flat.items()}
    assert read_metrics(path) == expected


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


def test_environment_names_versions_but_not_the_machine(tmp_path):
    found = environment()
    assert set(found) == {"python", "torch", "transformers", "peft", "device", "threads", "commit"}
    assert found["torch"] == torch.__version__
    assert [value for value in found.values() if os.sep in str(value) or value == os.uname().nodename] == []
    write_metrics(tmp_path / "environment.json", found)


def test_the_commit_is_that_of_a_repository_that_has_this_package(tmp_path, monkeypatch):
    assert len(environment()["commit"] or "") in (0, 40)  # a checkout may lack its repository
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "of somebody else"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr("grade.results.__file__", str(tmp_path / "results.py"))
    (tmp_path / "results.py").touch()
    assert environment()["commit"] is None
    subprocess.run([*git, "add", "results.py"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "package"], check=True)
    assert len(environment()["commit"]) == 40
