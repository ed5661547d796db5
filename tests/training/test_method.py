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
    why = "reward 'judge' gives values only, so a gradient is distilled from them"
    assert chosen(task, caplog, judge) == ("distilled", why)
    method, why = chosen(task, caplog, ToyReward(task.backbone.hidden_size))
    assert method == "distilled" and why.startswith("the reward has a gradient")


def test_a_reward_on_the_embedding_table_is_differentiated_itself_unless_groups_are_asked_for(task, caplog):
    assert chosen(task, caplog)[0] == "ste"
    for changes in ({"num_generations": 4}, {"residual_weight": 0.3}):
        assert chosen(task, caplog, **changes)[0] == "distilled"


def test_settings_of_grpo_mean_grpo_as_in_a_script_for_trl(task, caplog):
    assert chosen(task, caplog, judge, scale_rewards="group") == ("grpo", "scale_rewards is a setting of grpo")
    assert chosen(task, caplog, judge, self_certainty_reward=True)[0] == "grpo"
    assert chosen(task, caplog, judge, num_generations=4, residual_weight=0.3)[0] == "distilled"


def test_beside_a_teacher_any_reward_is_distilled_unless_a_setting_means_grpo(task, caplog):
    why = "beside further terms of the objective the reward's values are enough"
    for reward in (None, judge, ToyReward(task.backbone.hidden_size)):
        assert chosen(task, caplog, reward, teacher="base", teacher_context="x ") == ("distilled", why)
    assert chosen(task, caplog, judge, teacher="base", scale_rewards="group")[0] == "grpo"
    alone = GradeTrainer(task.backbone, [], GradeConfig(use_cpu=True, teacher="base", report_to="none"))
    assert alone.config.method == "teacher"


def test_settings_of_both_or_of_others_are_one_line(task, caplog):
    with pytest.raises(InputError, match="method: got 'auto'; allowed: grpo, which has scale_rewards, or distilled, "
                                         "which has residual_weight"):  # fmt: skip
        chosen(task, caplog, judge, scale_rewards="group", residual_weight=0.0)
    with pytest.raises(InputError, match="got 'tau_start'; allowed: a setting of this method: only gumbel, ste"):
        MethodConfig(tau_start=1.0)
