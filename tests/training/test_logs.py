"""Figures of a row of the log."""

import torch
from conftest import make_prompts
from transformers import TrainerState

from grade.gradients.objective import GradientStep
from grade.training.logs import Lines, LogBuffer


def test_the_spread_of_rewards_is_that_of_the_completions_themselves():
    buffer, ones, nothing = LogBuffer(), torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3)
    buffer.add_step(GradientStep(ones, ones, torch.tensor([1.0, 3.0]), nothing, torch.tensor(0.0)), make_prompts(2))
    assert [float(buffer.figures[name][0]) for name in ("reward", "reward_std")] == [2, 1]


def test_the_lines_show_kl_in_nats_per_completion(capsys):
    """Sums 3 and 0.5, means 1.5 and 0.5 over two tokens and one."""
    buffer, mask = LogBuffer(), torch.tensor([[1, 1], [1, 0]])
    kl = torch.tensor([[1.0, 2.0], [0.5, 0.0]])
    buffer.add_step(GradientStep(mask, mask, torch.ones(2), kl, torch.tensor(0.0)), make_prompts(2))
    row = {name: float(values[0]) for name, values in buffer.figures.items()}
    assert (row["kl"], row["kl_per_completion"]) == (1.0, 1.75)
    state = TrainerState(global_step=1, max_steps=2, is_world_process_zero=True)
    Lines({}, print).on_log(None, state, None, {**row, "seconds": 0.0})
    assert "kl_per_completion 1.75" in capsys.readouterr().out


def test_completions_that_did_not_end_and_groups_of_equal_rewards(caplog):
    buffer = LogBuffer(ends=(7,))
    ids = torch.tensor([[1, 7, 7], [1, 2, 7], [1, 2, 3], [7, 1, 1]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]])  # the second was cut where the batch was longer
    buffer.add_step(GradientStep(ids, mask, torch.ones(4), torch.zeros(4, 3), torch.tensor(0.0)), make_prompts(4))
    buffer.add_groups(torch.tensor([[1.0, 1.0 + 1e-7], [1.0, 2.0], [torch.nan, 3.0], [0.0, 0.0]]))
    assert not caplog.records
    for _ in range(2):
        buffer.add_groups(torch.ones(2, 2))
    figures = {name: [float(value) for value in values] for name, values in buffer.figures.items()}
    assert figures["completions/clipped_ratio"] == [0.5] and figures["frac_reward_zero_std"] == [0.75, 1.0, 1.0]
    assert len(caplog.records) == 1 and "nothing to learn" in caplog.text
