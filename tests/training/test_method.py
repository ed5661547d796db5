"""What ``method: auto`` stands for."""

import pytest
from conftest import ToyReward

from grade import GradeConfig, GradeTrainer
from grade.errors import InputError
from grade.gradients.methods import MethodConfig
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
            why = "rloo; after a quarter of the steps a token bias, if it predicts the rewards of new completions"
            assert chosen(task, caplog, reward, **limit) == ("tilt", why)


def test_settings_of_grpo_mean_grpo_as_in_a_script_for_trl(task, caplog):
    assert chosen(task, caplog, judge, scale_rewards="group") == ("grpo", "scale_rewards is a setting of grpo")
    assert chosen(task, caplog, judge, self_certainty_reward=True)[0] == "grpo"


def test_a_teacher_alone_is_what_is_learned_and_beside_rewards_their_values_are_enough(task, caplog):
    for reward in (None, judge):
        assert chosen(task, caplog, reward, teacher="base", teacher_context="x ")[0] == "rloo"
    assert chosen(task, caplog, judge, teacher="base", scale_rewards="group")[0] == "grpo"
    alone = GradeTrainer(task.backbone, [], GradeConfig(use_cpu=True, teacher="base", report_to="none"))
    assert alone.config.method == "teacher"


def test_settings_of_others_are_one_line():
    with pytest.raises(InputError, match="got 'tau_start'; allowed: a setting of this method: only gumbel, ste"):
        MethodConfig(tau_start=1.0)
