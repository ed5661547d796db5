"""Training moves what it should, and where the batch is computed does not matter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator, debug_launcher

from grade.gradients.methods import POLICY_GRADIENTS
from grade.training.config import TrainConfig
from grade.training.loop import _optimizer_step, _prompt_stream, run_training
from grade.training.toy import toy_task

SMALL = dict(
    max_steps=2, max_prompt_tokens=6, max_new_tokens=6, min_new_tokens=2, batch_size=4, eval_every=0, eval_prompts=8,
    final_eval_prompts=8, kl_eval_prompts=8, learning_rate=1e-2, gumbel_topk=16,
)  # fmt: skip


def run(**changes):
    task = toy_task()
    before = {n: p.detach().clone() for n, p in task.backbone.model.named_parameters()}
    result = run_training(TrainConfig(**{**SMALL, **changes}), task, Accelerator(cpu=True), lambda line: None)
    return task, before, result


def test_every_adapter_parameter_moves_and_nothing_else_does():
    task, before, _ = run()
    for name, p in task.backbone.model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name), name


def test_reward_rises_when_it_is_all_that_counts():
    _, _, result = run(max_steps=25, kl_coef=0.0, final_eval_prompts=128, batch_size=8)
    gain = result.after.reward - result.before.reward
    assert gain.mean() > 5 * gain.std(ddof=1) / np.sqrt(len(gain))


def test_kl_holds_the_policy_back():
    kls = [run(max_steps=15, kl_coef=beta)[2].after.kl.mean() for beta in (0.0, 1.0)]
    assert kls[1] < kls[0] / 3


def test_kl_is_zero_at_the_first_step():
    for method in ("ste", "gumbel", "ste_legacy", "gumbel_legacy"):
        _, _, result = run(method=method, max_steps=1)
        assert abs(result.history[1]["train/kl"]) <= 1e-6
        assert result.before.kl_max <= 1e-6


def test_warm_up_and_tau_schedule_reach_the_history():
    _, _, result = run(max_steps=4, warmup_steps=3, tau_start=2.0, tau_end=1.0, tau_anneal_steps=2)
    assert [row["train/tau"] for row in result.history[1:]] == [2.0, 1.5, 1.0, 1.0]
    rates = [row["train/learning_rate"] for row in result.history[1:]]
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])


GROUPS = {"reinforce": 1, "rloo": 4, "remax": 1, "grpo": 4, "ppo": 1}


@pytest.mark.parametrize("method", POLICY_GRADIENTS)
def test_policy_gradients_move_the_adapter_alone_and_count_every_completion(method):
    options = {"minibatches": 2} if method in ("grpo", "ppo") else {}
    task, before, result = run(method=method, gumbel_topk=64, **options)
    for name, p in task.backbone.model.named_parameters():
        assert torch.equal(p, before[name]) == ("lora_" not in name), name
    greedy = 4 if method == "remax" else 0
    assert [row["samples"] for row in result.history] == [0, 4 + greedy, 8 + 2 * greedy]
    first = result.history[1]
    assert abs(first["train/kl"]) <= 1e-6 and first["train/tau"] is None
    assert first["train/loss"] == pytest.approx(-first["train/reward"], abs=1e-6)
    assert ("train/value_loss" in first) == (method == "ppo")
    config = TrainConfig(method=method, batch_size=4)
    assert len(next(_prompt_stream(config, task, Accelerator(cpu=True)))) == 4 // GROUPS[method]


def test_the_value_head_is_a_group_of_its_own(monkeypatch):
    made, adamw = [], torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **options: made.append(adamw(*args, **options)) or made[-1])
    run(method="ppo", gumbel_topk=64, max_steps=1, value_learning_rate=0.05)
    policy, value = made[-1].param_groups
    assert (policy["lr"], value["lr"], len(value["params"])) == (1e-2, 0.05, 2)


def test_a_policy_gradient_raises_reward_when_it_is_all_that_counts():
    options = dict(max_steps=20, kl_coef=0.0, final_eval_prompts=128, batch_size=32, gumbel_topk=64)
    _, _, result = run(method="rloo", **options)
    gain = result.after.reward - result.before.reward
    assert gain.mean() > 5 * gain.std(ddof=1) / np.sqrt(len(gain))


def save_gradient_of_one_step(path, accumulation):
    config = TrainConfig(**SMALL, gradient_accumulation_steps=accumulation)
    accelerator, task = Accelerator(cpu=True), toy_task()
    parameters = task.backbone.trainable_parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    row = _optimizer_step(config, task, accelerator, optimizer, _prompt_stream(config, task, accelerator), 1)
    if accelerator.is_main_process:
        grads = torch.cat([p.grad.flatten() for p in parameters])
        torch.save({"processes": accelerator.num_processes, "gradient": grads, "reward": row["train/reward"]}, path)


def launch(folder):
    """One process with two batches, then two with one each. They are forked: torch is imported once for all."""
    for processes in (1, 2):
        debug_launcher(save_gradient_of_one_step, (f"{folder}/{processes}.pt", 3 - processes), processes)


def test_two_processes_give_the_gradient_of_one_with_both_batches(tmp_path):
    # Launched from a fresh process, which has no threads that a fork would lose.
    command = [sys.executable, "-c", "import sys, test_loop; test_loop.launch(sys.argv[1])", str(tmp_path)]
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    assert (one["processes"], two["processes"]) == (1, 2)
    # float32; a microbatch's noise is seeded by its place in the step, so only the order of the sum differs.
    assert (two["gradient"] - one["gradient"]).norm() <= 1e-6 * one["gradient"].norm()
    assert two["reward"] == pytest.approx(one["reward"], abs=1e-6)
