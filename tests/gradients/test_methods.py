"""Methods by name: which settings they read, and the temperature of a step."""

import pytest

from grade.errors import InputError
from grade.gradients.methods import METHODS, OPTIONS, MethodConfig, reads
from grade.training.config import GradeConfig
from grade.training.toy import toy_task
from grade.training.trainer import GradeTrainer


def test_a_run_anneals_its_temperature_from_the_first_step(tmp_path):
    task = toy_task()
    config = GradeConfig(
        str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", eval_strategy="no", disable_tqdm=True,
        method="gumbel", tau_start=2.0, tau_end=1.0, tau_anneal_steps=4, max_completion_length=3, max_steps=3,
        logging_steps=1, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = GradeTrainer(task.backbone, task.reward_model, config, [{"prompt": text} for text in task.train_prompts])
    trainer.train()
    assert [row["tau"] for row in trainer.state.log_history if "tau" in row] == [2.0, 1.75, 1.5]


@pytest.mark.parametrize("method", METHODS)
def test_a_setting_that_a_method_does_not_read_is_refused(method):
    other = {"hops": 3, "rao_draws": 2, "residual_weight": 0.5, "epsilon": 0.1, "gamma": 0.9, "baseline_momentum": 0.5}
    for option, value in other.items():
        if reads(method, option):
            assert getattr(MethodConfig(method=method, **{option: value}), option) == value
        else:
            with pytest.raises(InputError, match=f"{option}: got {value}; allowed: only with {OPTIONS[option][0]}"):
                MethodConfig(method=method, **{option: value})
    kept = MethodConfig.values_for(method, other | {"max_completion_length": 7})
    assert kept["method"] == method and kept["max_completion_length"] == 7
    assert {name for name in other if name in kept} == {name for name in other if reads(method, name)}
