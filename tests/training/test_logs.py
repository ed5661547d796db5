"""Figures of a row of the log."""

import json
from types import SimpleNamespace

import torch
from conftest import make_prompts

from grade.gradients.objective import GradientStep
from grade.rewards.rewards import Scores
from grade.training.logs import LogBuffer


def test_the_spread_of_rewards_is_that_of_the_completions_themselves():
    buffer, ones, nothing = LogBuffer(), torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3)
    buffer.add_step(GradientStep(ones, ones, torch.tensor([1.0, 3.0]), nothing, torch.tensor(0.0)), make_prompts(2))
    assert [float(buffer.figures[name][0]) for name in ("reward", "reward_std")] == [2, 1]


def test_a_checkpoint_keeps_what_the_next_row_of_the_log_is_of():
    """Figures and completions, as JSON."""
    tokenizer = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))
    buffer, again, ones = LogBuffer(tokenizer), LogBuffer(tokenizer), torch.ones(2, 3, dtype=torch.long)
    step = GradientStep(ones, ones, torch.tensor([1.0, 3.0]), torch.zeros(2, 3), torch.tensor(0.0))
    buffer.add_step(step, make_prompts(2), Scores({"length": torch.tensor([1.0, 3.0])}))
    again.restore(json.loads(json.dumps(buffer.state())))
    assert len(again.rows) == 2 and again.rows == buffer.rows
    assert again.figures == buffer.figures
