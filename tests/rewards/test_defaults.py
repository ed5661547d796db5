"""What functions of the wing do when an argument is left out, as their documentation says."""

import inspect

import pytest
import torch

from grade.rewards.arithmetic import Problems
from grade.rewards.fit import evaluate_reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.labels import calibration_error
from grade.rewards.model import RewardModel
from grade.rewards.rewards import Rewards
from grade.rewards.shallow import ShallowReward
from grade.rewards.text import beginning
from grade.rewards.verifiers import exact_answer


@pytest.mark.parametrize(
    ("function", "defaults"),
    [
        (Problems.make, {"seed": 0, "terms": 2, "digits": 1}),
        (evaluate_reward, {"lengths": (32, 64, 128), "batch_size": 32}),
        (FunctionReward, {"name": None, "dtype": torch.float32}),
        (GoldJudge.fit, {"c": 3.0, "n_crops": 4, "seed": 0}),
        (calibration_error, {"bins": 10}),
        (RewardModel.score_ids, {"batch_size": 64}),
        (Rewards, {"weights": None, "names": None, "scope": "prompt_and_completion", "dtype": torch.float32}),
        (ShallowReward, {"tokens": 64, "seed": 0}),
        (beginning, {"characters": 40}),
        (exact_answer, {"column": "answer", "pattern": None, "ignore_case": False}),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_defaults(function, defaults):
    parameters = inspect.signature(function).parameters.values()
    assert {p.name: p.default for p in parameters if p.default is not p.empty} == defaults
