"""A run in memory moves what it should; what it reports is what happened."""

import numpy as np
import pytest
import torch

from grade.gradients.methods import AUTO, POLICY_GRADIENTS
from grade.training.config import TrainConfig
from grade.training.run import run_metrics, run_training
from grade.training.toy import toy_task

SMALL = dict(
    method="ste", max_steps=2, max_prompt_length=6, truncation="right", raw_prompts=True, max_completion_length=6,
    min_completion_length=2, per_device_train_batch_size=4, final_eval_prompts=8, kl_eval_prompts=8, learning_rate=1e-2,
    lr_scheduler_type="constant", gumbel_topk=16, beta=0.25, seed=0, use_cpu=True,
)  # fmt: skip


def settings(**changes):
    values = {**SMALL, **changes}
    grouped = {"num_generations": 4} if values["method"] in ("rloo", "grpo", AUTO) else {}
    return TrainConfig(**TrainConfig.values_for(values["method"], values | grouped))


def weights(backbone):
    return {n: p.detach().clone() for n, p in backbone.model.named_parameters()}


def run(**changes):
    task = toy_task()
    before = weights(task.backbone)
    return task, before, run_training(settings(**changes), task)


def test_warm_up_and_tau_reach_the_history():
    _, _, result = run(max_steps=4, lr_scheduler_type="constant_with_warmup", warmup_steps=2, tau=1.5)
    assert [row["train/tau"] for row in result.history[1:]] == [1.5] * 4
    # transformers' schedule: the first step has none of the rate.
    assert [row["train/learning_rate"] for row in result.history[1:]] == pytest.approx([0.0, 5e-3, 1e-2, 1e-2])


@pytest.mark.parametrize("method", ("ste", *POLICY_GRADIENTS, AUTO))
def test_a_method_moves_the_adapter_alone_and_counts_every_completion(method):
    task, before, result = run(method=method)
    for name, p in task.backbone.model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name), name
    greedy = 4 if method == "remax" else 0
    assert [row["samples"] for row in result.history] == [0, 4 + greedy, 8 + 2 * greedy]
    first = result.history[1]
    assert abs(first["train/kl"]) <= 1e-6 and (first["train/tau"] is None) == (method != "ste")
    assert first["train/loss"] == pytest.approx(-first["train/reward"], abs=1e-6)
    assert ("train/value_loss" in first) == (method == "ppo")


@pytest.mark.parametrize(("method", "steps", "batch"), [("ste", 25, 8), ("rloo", 20, 32)])
def test_reward_rises_when_it_is_all_that_counts(method, steps, batch):
    size = {"max_steps": steps, "final_eval_prompts": 128, "per_device_train_batch_size": batch}
    _, _, result = run(method=method, beta=0.0, **size)
    gain = result.after.reward - result.before.reward
    assert gain.mean() > 5 * gain.std(ddof=1) / np.sqrt(len(gain))


def test_the_metrics_name_the_method_and_what_auto_chose():
    for method, extra in (("rloo", {}), (AUTO, {"method_chosen": "tilt"})):
        task, _, result = run(method=method)
        metrics = run_metrics(settings(method=method), result, task.backbone)
        assert {k: v for k, v in metrics.items() if k.startswith("method")} == {"method": method} | extra


def test_the_curve_is_over_one_number_of_prompts_and_the_ends_over_more():
    _, _, result = run(max_steps=3, eval_strategy="steps", eval_steps=1, eval_prompts=4, final_eval_prompts=12)
    assert [row["val/reward_n"] for row in result.history] == [4, 4, 4, 4]
    assert len(result.before.reward) == len(result.after.reward) == 12
    assert result.history[0]["val/reward_mean"] == pytest.approx(result.before.reward[:4].mean())
    assert result.history[-1]["val/reward_mean"] == pytest.approx(result.after.reward[:4].mean())


def test_a_run_with_the_same_seed_is_the_same_whatever_torch_drew_before():
    ends = []
    for junk in (0, 1):
        torch.manual_seed(junk)
        ends.append(weights(run()[0].backbone))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
