"""What ``method: auto`` stands for."""

import pytest
from conftest import ToyReward

from grade.errors import InputError
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.rewards.base import Reward
from grade.rewards.rewards import make_rewards
from grade.training.method import choose_method
from grade.training.toy import toy_task
from grade.training.trainer import GradeConfig, GradeTrainer


class Judge(Reward):
    name = "judge"

    def score(self, policy, prompts, ids, mask):
        raise NotImplementedError


def chosen(reward, **settings):
    return choose_method(MethodConfig(**settings), Objective(reward))


def test_auto_is_the_default_and_says_what_it_chose_and_why():
    assert MethodConfig().method == "auto"
    assert chosen(Judge()) == ("distilled", "reward 'judge' gives values only, so a gradient is distilled from them")
    name, why = chosen(ToyReward(4))
    assert name == "distilled" and why.startswith("the reward has a gradient")


class Bag(ToyReward):
    kind = "bag"


def test_a_reward_on_the_embedding_table_is_differentiated_itself_unless_groups_are_asked_for():
    assert chosen(Bag(4))[0] == "ste"
    assert chosen(Bag(4), num_generations=4)[0] == chosen(Bag(4), residual_weight=0.3)[0] == "distilled"


def test_the_trainer_sees_what_a_reward_model_reads():
    task = toy_task()
    assert choose_method(MethodConfig(), Objective(make_rewards(task.reward_model, task.backbone)))[0] == "ste"
    config = GradeConfig(use_cpu=True, max_completion_length=4, report_to="none")
    trainer = GradeTrainer(task.backbone, task.reward_model, config, [{"prompt": text} for text in task.train_prompts])
    assert (config.method, trainer.args.method) == ("auto", "ste")


def test_settings_of_grpo_mean_grpo_as_in_a_script_for_trl():
    assert chosen(Judge(), scale_rewards="group") == ("grpo", "scale_rewards is a setting of grpo")
    assert chosen(Judge(), self_certainty_reward=True)[0] == "grpo"
    assert chosen(Judge(), num_generations=4, residual_weight=0.3)[0] == "distilled"


def test_settings_of_both_are_one_line():
    with pytest.raises(InputError, match="method: got 'auto'; allowed: grpo, which has scale_rewards, or distilled, "
                                         "which has residual_weight"):  # fmt: skip
        chosen(Judge(), scale_rewards="group", residual_weight=0.0)


def test_settings_of_other_methods_are_not_for_auto():
    with pytest.raises(InputError, match="tau_start: got 1.0"):
        MethodConfig(tau_start=1.0)
