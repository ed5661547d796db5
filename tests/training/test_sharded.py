"""A base that is divided between two processes trains as a whole one does on both batches."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from fresh_process import script
from training.runs import assert_equal_adapters

from grade.gradients.methods import METHODS
from grade.models.sharded import divide
from grade.training.load import divider

SCRIPT = Path(__file__).with_name("processes.py")
ALL = os.environ.get("GRADE_ALL_CASES") == "1"
CASES = METHODS if ALL else ("gumbel", "grpo")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    done, errors = script(SCRIPT, folder, "--sharded", *CASES, timeout=280 if len(CASES) < 3 else 1800)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + errors[-2000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def assert_same(one, two):
    pd.testing.assert_frame_equal(*(pd.read_csv(folder / "history.csv") for folder in (one, two)), rtol=1e-5)
    assert_equal_adapters(one, two, 2e-5)  # AdamW's first steps enlarge the differences


@pytest.mark.parametrize("method", CASES)
def test_two_processes_with_half_the_base_each_train_as_one_does(runs, method):
    assert_same(runs[0] / f"{method}-1", runs[0] / f"{method}-2")


def test_completions_end_early_so_processes_do_wait_for_each_other(runs):
    assert pd.read_csv(runs[0] / f"{CASES[-1]}-2" / "history.csv")["train/length"].max() < 8


def test_a_run_goes_on_with_another_number_of_processes(runs):
    folder, codes = runs
    assert codes == [[-9], [-9, -9], [0]]
    assert_same(folder / f"{CASES[-1]}-1", folder / "across")


def test_what_accelerate_was_asked_for_is_done_here_and_not_asked_of_it_again(monkeypatch):
    one, two = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    monkeypatch.setenv("GRADE_DIVIDER", "")
    assert divider(two) is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert divider(one) is None and divider(two) is divide
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"
