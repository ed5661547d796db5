"""What ``method: auto`` stands for."""

import math

import pytest
import torch
from conftest import ToyReward
from training.runs import toy_trainer

from grade import GradeConfig, GradeTrainer
from grade.gradients.methods import MethodConfig
from grade.models.scoring import predicting_hidden
from grade.training.toy import toy_task


@pytest.fixture(scope="module")
def task():
    return toy_task()


def chosen(task, caplog, reward=None, **settings):
    """Method and reason."""
    config = GradeConfig(use_cpu=True, max_completion_length=4, report_to="none", **settings)
    rows = [{"prompt": text} for text in task.train_prompts[:8]]
    made = GradeTrainer(task.backbone, reward or task.reward_model, config, rows)
    assert config.method == "auto", "the user's settings are left as they are"
    said = [record.message for record in caplog.records if record.message.startswith("method: ")]
    method, _, why = said[-1].removeprefix("method: ").partition(": ")
    assert made.config.method == method
    return method, why


def judge(completions, **_):
    return [0.0 for _ in completions]


def test_auto_is_the_default_and_says_what_it_chose_and_why(task, caplog):
    assert MethodConfig().method == "auto"
    for reward in (judge, ToyReward(task.backbone.hidden_size)):
        why = "without target_kl or beta nothing limits a token bias"
        assert chosen(task, caplog, reward) == ("rloo", why)
        for limit in ({"target_kl": 1.0}, {"beta": 0.1}):
            why = "rloo; after a quarter or half of the steps a token bias, if it predicts new rewards"
            assert chosen(task, caplog, reward, **limit) == ("tilt", why)


def test_settings_of_grpo_mean_grpo_as_in_a_script_for_trl(task, caplog):
    assert chosen(task, caplog, judge, scale_rewards="group") == ("grpo", "scale_rewards is a setting of grpo")


def test_a_teacher_alone_is_what_is_learned_and_beside_rewards_their_values_are_enough(task, caplog):
    for reward in (None, judge):
        assert chosen(task, caplog, reward, teacher="base", teacher_context="x ")[0] == "rloo"
    assert chosen(task, caplog, judge, teacher="base", scale_rewards="group")[0] == "grpo"
    alone = GradeTrainer(task.backbone, [], GradeConfig(use_cpu=True, teacher="base", report_to="none"))
    assert alone.config.method == "teacher"


def halves(completions, **_):
    return [0.5 * i for i in range(len(completions))]


def test_a_reward_that_changes_with_the_policy_fits_no_token_bias(task, caplog):
    assert chosen(task, caplog, ["self_certainty", judge], target_kl=1.0)[0] == "rloo"


@pytest.mark.parametrize("reward", [None, halves])
def test_self_certainty_is_learned_alone_or_beside_a_reward(task, reward, tmp_path):
    rewards = "self_certainty" if reward is None else [reward, "self_certainty"]
    trainer = toy_trainer(task, tmp_path, rewards, 4, num_generations=4, max_completion_length=4, max_steps=1)
    assert trainer.rewards.names == ([] if reward is None else ["halves"]) + ["self_certainty"]
    prompts = trainer.encode(trainer.train_dataset[:2])
    ids, mask = torch.arange(3, 11).view(2, 4), torch.ones(2, 4, dtype=torch.long)
    hidden = predicting_hidden(trainer.backbone, prompts, ids)
    logp = trainer.backbone.head(hidden.flatten(0, 1)).log_softmax(-1)
    certainty = (-logp.mean(-1) - math.log(logp.shape[1])).view(2, 4).mean(1).detach()
    alone = trainer.rewards.score(trainer.backbone, prompts, ids, mask)
    values = trainer.rewards.last.values
    torch.testing.assert_close(values["self_certainty"], certainty)
    torch.testing.assert_close(alone, certainty + values.get("halves", 0))
    trainer.train()
    row = trainer.state.log_history[-1]
    mean = row["rewards/self_certainty/mean"]
    assert mean > 0 and row["reward"] == pytest.approx(mean + (0 if reward is None else 0.75), rel=1e-5)
