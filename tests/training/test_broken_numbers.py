"""NaN and infinity end a run or an evaluation with one line."""

import pytest
import torch

from grade.errors import InputError
from grade.training.config import TrainConfig
from grade.training.evaluate import evaluate
from grade.training.run import run_training
from grade.training.toy import toy_task

SMALL = {
    "method": "ste", "gumbel_topk": 16, "max_prompt_length": 6, "truncation": "right", "max_completion_length": 4,
    "per_device_train_batch_size": 4, "max_steps": 3, "use_cpu": True, "report_to": [], "final_eval_prompts": 8,
    "kl_eval_prompts": 0, "output_dir": "not made",
}  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_reward_that_is_no_number_ends_an_evaluation(value):
    task = toy_task()

    def reward(embeds, mask):
        return torch.where(torch.arange(len(embeds)) == 1, value, 0.0)

    with pytest.raises(InputError, match=r"reward: got (nan|-?inf); allowed: finite numbers; 1 of 4 are not"):
        evaluate(
            task.backbone, task.validation_prompts[:8], reward, max_new_tokens=4, max_prompt_tokens=6, batch_size=4
        )


def test_weights_that_are_no_numbers_are_seen_after_their_own_step(monkeypatch):
    task, real, steps = toy_task(), torch.optim.AdamW.step, []

    def step(self, *args, **options):
        real(self, *args, **options)
        steps.append(self)
        if len(steps) == 2:
            self.param_groups[0]["params"][-1].data[0] = float("inf")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    config, lines = TrainConfig.parse(SMALL | {"eval_on_start": False}), []
    with pytest.raises(InputError, match="learning_rate: got .*: weights are not finite after step 2"):
        run_training(config, task, lines.append)
    assert len(lines) == 1
