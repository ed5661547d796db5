"""Two processes give what one gives with twice the microbatches, and fail together."""

import json
import os
from pathlib import Path

import pandas as pd
import pytest
from fresh_process import script
from training.runs import assert_equal_adapters

from grade.gradients.methods import METHODS
from grade.results import read_metrics

SCRIPT = Path(__file__).with_name("processes.py")
ALL = os.environ.get("GRADE_ALL_CASES") == "1"
CASES = tuple(METHODS) if ALL else ("gumbel", "reinforce", "grpo", "ppo", "teacher")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "fails.py").write_text(
        "import os\n"
        "def reward(completions, **_):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise KeyError('judge is gone')\n"
        "    return [0.0 for _ in completions]\n"
    )
    done, errors = script(SCRIPT, folder, f"{folder}/fails.py:reward", *CASES)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + errors[-2000:]
    return folder, json.loads(done.stdout.splitlines()[-1]), errors


@pytest.mark.parametrize("method", CASES)
def test_two_processes_train_as_one_does_on_both_batches(runs, method):
    one, two = (runs[0] / f"{method}-{n}" for n in (1, 2))
    # float64: noise depends on a completion's number in the step, so only the order of the sum differs.
    metrics = [read_metrics(folder / "metrics.json") for folder in (one, two)]
    assert metrics[0] == {
        name: pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
        for name, value in metrics[1].items()
    }
    pd.testing.assert_frame_equal(*(pd.read_csv(folder / "history.csv") for folder in (one, two)), rtol=1e-4, atol=1e-6)
    assert ("train/kl_scale" in (one / "history.csv").read_text()) == (method in ("gumbel", "ppo"))
    assert_equal_adapters(one, two, 1e-12)


def test_a_reward_that_fails_on_one_process_says_so_and_ends_both(runs):
    _, codes, errors = runs
    assert codes[0] and codes[1] == 2, errors
    messages = [line for line in errors.splitlines() if "judge is gone" in line]
    assert len(messages) == 1 and messages[0].startswith("grade train (process 1): reward 'reward'"), errors
