"""A saved adapter is the policy that was chosen."""

import json

import pytest
import torch
from training.runs import settings, toy_project

from grade.training.load import load_task
from grade.training.run import evaluate_task, train


def test_the_best_policy_is_the_result_with_its_own_figures_and_optimizer(tmp_path):
    changes = {"max_steps": 4, "save_total_limit": None, "metric_for_best_model": "reward", "eval_steps": 2}
    config = settings("ste", toy_project(tmp_path) | changes | {"eval_prompts": 6}, tmp_path / "run")
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
