"""A base that is divided between two processes trains as a whole one does on both batches."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
from fresh_process import script
from training.runs import assert_equal_adapters

from grade.errors import InputError
from grade.gradients.methods import METHODS
from grade.training.config import FSDP2, SHARDING, TrainConfig, sharding

SCRIPT = Path(__file__).with_name("processes.py")
ALL = os.environ.get("GRADE_ALL_CASES") == "1"
CASES = METHODS if ALL else ("gumbel", "grpo")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    done, errors = script(SCRIPT, folder, "--sharded", *CASES, timeout=280 if len(CASES) < 3 else 1800)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + errors[-2000:]
    return folder


@pytest.fixture(scope="module")
def results(runs):
    return json.loads((runs / "results.json").read_text())


def assert_same(one, two):
    pd.testing.assert_frame_equal(*(pd.read_csv(folder / "history.csv") for folder in (one, two)), rtol=1e-5)
    assert_equal_adapters(one, two, 2e-5)  # AdamW's first steps enlarge the differences


@pytest.mark.parametrize("method", CASES)
def test_two_processes_with_half_the_base_each_train_as_one_does(runs, method):
    assert_same(runs / f"{method}-1", runs / f"{method}-2")


def test_completions_end_early_so_processes_do_wait_for_each_other(runs):
    assert pd.read_csv(runs / f"{CASES[-1]}-2" / "history.csv")["train/length"].max() < 8


def test_a_run_goes_on_with_another_number_of_processes(runs, results):
    assert results["interrupted"] == [[-9], [-9, -9], [0]]
    assert_same(runs / f"{CASES[-1]}-1", runs / "across")


def test_an_error_in_one_process_ends_both_in_the_middle_of_a_step(runs, results):
    assert results["breaking"][0] and results["breaking"][1] == 2
    errors = (runs / "errors.log").read_text().splitlines()
    assert errors.count("grade train (process 1): loss: got nan; allowed: finite numbers on the second process") == 1


def test_a_sharded_base_has_the_hidden_states_of_a_whole_one(results):
    assert results["recorded"] == [0, 0]


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "deepspeed"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "mixed_precision"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version"),
        ({SHARDING: "zero3"}, "grade_sharding"),
    ],
)
def test_what_accelerate_can_do_and_this_cannot_is_refused_by_name(monkeypatch, variables, name):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InputError) as error:
        sharding()
    assert error.value.field == f"accelerate launch: {name}"


@pytest.mark.parametrize(("variable", "value", "name"), [
    ("WORLD_SIZE", "", "WORLD_SIZE"), ("WORLD_SIZE", "abc", "WORLD_SIZE"), ("LOCAL_RANK", "", "LOCAL_RANK"),
    ("WORLD_SIZE", "2", "MASTER_ADDR"), ("LOCAL_RANK", "0", "MASTER_ADDR"),
])  # fmt: skip
def test_a_variable_of_a_launcher_is_named(monkeypatch, variable, value, name):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=f"^environment: {name}: got "):
        TrainConfig.parse({"output_dir": "x", "use_cpu": True}, "run.yaml")


def test_fsdp2_is_taken_over_from_accelerate_so_that_it_does_not_wrap_the_model_again(monkeypatch):
    monkeypatch.delenv(SHARDING, raising=False)
    assert sharding() == ""
    for variable, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", SHARDING: ""}.items():
        monkeypatch.setenv(variable, value)
    assert sharding() == FSDP2 and sharding() == FSDP2
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"
