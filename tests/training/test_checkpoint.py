"""A saved adapter names its base and is the policy that was chosen."""

import json

import pytest
import torch
from training.runs import settings, toy_project

from grade.models.adapter import ADAPTER_FILES, BASE_FILE
from grade.training.load import load_task
from grade.training.run import evaluate_task, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with checkpoints, and its settings."""
    root = tmp_path_factory.mktemp("run")
    common = toy_project(root) | {"max_steps": 4, "save_steps": 2, "save_total_limit": None, "eval_strategy": "no"}
    train(settings("ste", common, root / "run"), lambda line: None)
    return root / "run", common


def test_every_saved_adapter_has_the_fingerprint_of_its_base_and_sorted_settings(run):
    folder, _ = run
    places = [folder / name for name in ("adapter", "checkpoints/step-2")]
    prints = {(place / BASE_FILE).read_bytes() for place in places}
    assert len(prints) == 1
    for place in places:
        targets = json.loads((place / ADAPTER_FILES[0]).read_text())["target_modules"]
        assert targets == sorted(targets) and len(targets) > 1


def test_the_best_policy_is_the_result_with_its_own_figures_and_optimizer(run, tmp_path):
    config = settings("ste", run[1] | {
        "metric_for_best_model": "reward",
        "eval_strategy": "steps", "eval_steps": 2, "eval_prompts": 6,
    }, tmp_path / "run")  # fmt: skip
    train(config, lambda line: None)
    adapter, metrics = tmp_path / "run" / "adapter", json.loads((tmp_path / "run" / "metrics.json").read_text())
    evaluation = evaluate_task(config, load_task(config, adapter=str(adapter)), 6)
    figures = {name.removeprefix("val/"): value for name, value in evaluation.metrics().items()}
    assert metrics["after"]["val"] == pytest.approx(figures, rel=1e-5)
    assert metrics["before"]["val"]["reward_n"] == metrics["gain"]["reward_n"] == 6 and metrics["steps"] == 4
    samples = json.loads((tmp_path / "run" / "samples.json").read_text())
    assert [sample["after"] for sample in samples] == evaluation.completions[: len(samples)]
    state = torch.load(adapter / "optimizer.pt", weights_only=True)["state"]
    assert state[0]["step"] == 2
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-4"]
    assert "that of checkpoint-2, whose reward is the best" in (adapter / "README.md").read_text()
