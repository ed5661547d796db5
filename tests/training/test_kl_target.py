"""Beta is moved until KL is at its target, and nothing else is changed by that."""

import json
import math
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from grade.errors import InputError
from grade.training import kl_target
from grade.training.config import TrainConfig
from grade.training.kl_target import KLTarget
from grade.training.load import load_task
from grade.training.run import run_training, train
from grade.training.toy import toy_task
from grade.training.trainer import GradeTrainer

sys.path.insert(0, str(Path(__file__).parent))
from runs import settings, toy_project  # noqa: E402

SMALL = dict(
    max_prompt_length=6, truncation="right", raw_prompts=True, max_completion_length=8, min_completion_length=8,
    per_device_train_batch_size=16, learning_rate=1e-2, lr_scheduler_type="constant", seed=0, use_cpu=True,
    eval_dataset="", save_strategy="no", disable_tqdm=True,
)  # fmt: skip
OWN = {"ste": {"gumbel_topk": 16}, "rloo": {"num_generations": 4}}


def config(method, **changes):
    return TrainConfig(method=method, **SMALL, **OWN[method], **changes)


def toy_trainer(method, output, **changes):
    task, args = toy_task(), config(method, output_dir=str(output), **changes)
    rows = [{"prompt": text} for text in task.train_prompts]
    return GradeTrainer(task.backbone, task.reward_model, args, rows, rows[:8])


# ---- the controller ----
def test_beta_follows_the_distance_that_is_expected():
    controller = KLTarget(16.0, 0.3)
    controller.update(16.0)
    # The distance sqrt(KL) goes from 4 to 4.2 in a step, so it will be 4.2 + 0.2 NEAR.
    expected = (4.2 + 0.2 * kl_target.NEAR) / 4 - 1
    assert controller.update(4.2**2) == pytest.approx(0.3 * math.exp(kl_target.GAIN * expected), rel=1e-12)


def test_on_the_way_up_from_zero_beta_is_not_lowered_but_where_kl_stands_still_it_is():
    rising, still = KLTarget(25.0, 0.3), KLTarget(25.0, 0.3)
    rising.update(0.0)
    assert still.update(0.0) == rising.beta < 0.3  # nothing is known of a slope yet
    start = rising.beta
    assert [rising.update((0.3 * t) ** 2) for t in range(1, 6)] == [start] * 5  # 0.3 a step gets there within FAR steps
    assert rising.update(2.1**2) > start  # 0.4 a step now: beyond it in 10
    betas = [still.update(1.0) for _ in range(6)]
    assert betas[-1] < betas[-2] < start


def test_once_the_target_was_reached_beta_falls_below_it_even_if_kl_rises():
    controller = KLTarget(25.0, 0.3)
    betas = [controller.update(distance**2) for distance in (5.0, 3.0, 3.1, 3.2, 3.3)]
    assert controller.update(3.4**2) < betas[-1]  # 0.1 a step: 4.4 in `NEAR` steps, 7.4 in `FAR`


@pytest.mark.parametrize(("kl", "factor"), [(0.0, 1 / kl_target.RANGE), (1e4, kl_target.RANGE)])
def test_a_target_out_of_reach_leaves_beta_within_its_range(kl, factor):
    controller = KLTarget(4.0, 0.3)
    before = 0.3
    for _ in range(100):
        after = controller.update(kl)
        # A step counts an error of at most LARGEST; with room for rounding.
        assert abs(math.log(after / before)) <= kl_target.GAIN * kl_target.LARGEST + 1e-12
        before = after
    assert before == pytest.approx(0.3 * factor, rel=1e-12)


@pytest.mark.parametrize("start", [0.1, 0.3, 1.0])
def test_a_policy_that_drifts_and_is_pulled_back_comes_to_the_target(start):
    """The distance from the reference moves by 0.2 * (1 - beta * distance) a step: at rest, KL is 1 / beta^2."""
    controller, distance, kls = KLTarget(9.0, start), 0.0, []
    for _ in range(120):
        kls.append(distance**2)
        distance += 0.2 * (1 - controller.update(kls[-1]) * distance)
    assert sum(kls[-20:]) / 20 == pytest.approx(9.0, rel=0.25)
    assert max(kls) <= 1.6 * 9.0
    assert controller.beta == pytest.approx(1 / 3, rel=0.25)


# ---- training ----
def replayed(history, target, start, length=8):
    """Beta of every step from the log's KL a token, all completions being equally long."""
    controller = KLTarget(target, start)
    betas = [start]
    for row in history[:-1]:
        betas.append(controller.update(row["train/kl"] * length))
    return betas


@pytest.mark.parametrize("method", OWN)
def test_training_adjusts_beta_to_the_steps_kl(method):
    task = toy_task()
    history = run_training(config(method, target_kl=0.5, beta=0.1, max_steps=12), task).history
    betas = [row["train/beta"] for row in history]
    # The log holds KL a token in float32.
    assert betas == pytest.approx(replayed(history, 0.5, 0.1), rel=1e-4)
    assert len(set(betas)) > 6


@pytest.mark.parametrize("method", OWN)
def test_the_objective_has_the_beta_that_is_logged_and_the_evaluation_the_current_one(method, tmp_path):
    made = toy_trainer(method, tmp_path, target_kl=0.05, beta=0.1, max_steps=4, eval_strategy="steps", eval_steps=4)
    made.train()
    assert made.objective.beta == made.kl_target.beta != 0.1
    logged = [row for row in made.state.log_history if "loss" in row][-1]
    loss = logged["beta"] * logged["kl"] - logged["reward"]
    assert logged["loss"] == pytest.approx(loss, abs=1e-4)  # the Trainer's loss has four decimals or more
    last = [row for row in made.state.log_history if "eval_loss" in row][-1]
    assert last["eval_loss"] == pytest.approx(made.kl_target.beta * last["eval_kl"] - last["eval_reward"], rel=1e-6)


@pytest.mark.parametrize("method", OWN)
def test_a_resumed_run_has_the_same_betas(method, tmp_path):
    common = toy_project(tmp_path) | {"max_steps": 5, "eval_strategy": "no", "target_kl": 0.5, "save_steps": 3}
    common |= {"save_total_limit": None, "logging_steps": 2}
    train(settings(method, common, tmp_path / "whole"), None)
    args = settings(method, common, tmp_path / "again")
    task = load_task(args, args.device)
    begin = tmp_path / "whole" / "checkpoint-3"
    assert run_training(args, task, None, tmp_path / "again", begin).step == 5
    whole = json.loads((tmp_path / "whole" / "checkpoint-5" / "grade_state.json").read_text())
    again = json.loads((tmp_path / "again" / "checkpoint-5" / "grade_state.json").read_text())
    assert whole["kl_target"] == again["kl_target"]
    adapters = [
        load_file(tmp_path / name / "checkpoint-5" / "adapter_model.safetensors") for name in ("whole", "again")
    ]
    assert all(value.equal(adapters[1][name]) for name, value in adapters[0].items())


# ---- errors ----
def test_a_target_needs_a_beta_to_start_from():
    with pytest.raises(InputError, match=r"target_kl: got 5.0; allowed: null, or a beta above 0 to start from"):
        TrainConfig(method="ste", target_kl=5.0, beta=0.0)
    with pytest.raises(InputError, match="target_kl: got 0.0"):
        TrainConfig(method="ste", target_kl=0.0, beta=0.1)
