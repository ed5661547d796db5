"""Every step lands on the schedule of KL, and nothing else is changed by that."""

import math

import numpy as np
import pytest
import torch
from training.runs import toy_trainer
from transformers import TrainerCallback

from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.models.scoring import completion_logps, sequence_kl
from grade.training.config import TrainConfig
from grade.training.kl_budget import LONGEST, TOLERANCE, BatchKL, KLBudget, scale_step
from grade.training.run import run_training
from grade.training.toy import toy_task

OWN = {"ste": {"gumbel_topk": 16}, "ppo": {"passes_per_step": 2}}


# ---- the line search ----
@pytest.mark.parametrize(
    ("change", "wanted", "scale"),
    [
        ((0, 4), 25, 1),  # KL = 9 + 16 c^2
        ((0, 4), 13, 0.5),
        ((0, 4), 153, 3),
        ((0, 4), 1000, LONGEST),
        ((0, 4), 4, 0),
        ((1, 0), 16, 1),  # (3 + c)^2
        ((0, 400), 25, 0.01),  # too far off at first to be measured
        ((-2, 2), 9, 1.5),  # 9 - 12 c + 8 c^2: at c = 0 it is 9 too, but a step is wanted
        ((-2, 2), 2, 0.75),  # out of reach: where it is lowest
        ((-0.2, 0), 16, 1),  # it falls, and more is wanted: the step as it is
    ],
)
@pytest.mark.parametrize("first", [1.0, 0.2])
def test_a_step_is_scaled_to_the_kl_that_is_wanted(change, wanted, scale, first):
    before = torch.tensor([3.0, 0.0], dtype=torch.float64)
    change = torch.tensor(change, dtype=torch.float64)
    parameter = before + change

    def measure():
        kl = float(parameter.square().sum())
        return kl if kl < 1e4 else math.nan

    found, landed = scale_step([parameter], [before], 9.0, wanted, measure, first)
    reached = float((before + scale * change).square().sum())
    assert landed == pytest.approx(reached, rel=TOLERANCE) == float(parameter.square().sum())
    assert parameter.equal(before + found * change)
    assert found == scale or scale and abs(found - scale) < 0.1


# ---- the schedule and the running estimate ----
def test_an_adapter_that_is_continued_goes_on_from_its_own_distance():
    budget = KLBudget(16.0, 3)
    budget.wanted(1, 1.0)
    assert [math.sqrt(budget.after(step)) for step in range(5)] == pytest.approx([1, 2, 3, 4, 4])


def batch(rng, kl, number):
    """KL of completions, of which a few have most of it."""
    return kl * rng.lognormal(-0.18, 0.6, number).mean()  # of mean KL


@pytest.mark.parametrize("steps", [5, 15, 40])
@pytest.mark.parametrize("share", [0.85, 1.0])
def test_noisy_batches_and_completions_that_grow_too_fast_still_end_near_the_budget(share, steps):
    """Before the landing: batches of 16 completions, whose KL grows by more than the policy's."""
    rng, ends = np.random.default_rng(0), []
    for _ in range(100):
        budget, kl = KLBudget(10.0, steps), 0.0
        for step in range(1, steps + 1):
            before = batch(rng, kl, 16)
            wanted = budget.wanted(step, before)
            kl = kl * (1 + share * (wanted / before - 1)) if kl else share * wanted
            budget.landed(before, wanted)
        ends.append(kl / 10)
    assert np.mean(ends) == pytest.approx(1, abs=0.06 if steps > 5 else 0.16)
    assert np.std(ends) < 0.12


# ---- the measurement ----
def test_a_moved_policys_kl_is_weighted_by_the_ratio_of_each_prefix():
    task = toy_task()
    backbone, prompts = task.backbone, encode_prompts(task.backbone.tokenizer, task.train_prompts[:16], 6)
    ids, mask = generate(backbone, prompts, 8, torch.Generator().manual_seed(0), 1.0, 0)
    batch = BatchKL(backbone, [(prompts[:8], ids[:8], mask[:8]), (prompts[8:], ids[8:], mask[8:])], length=9)
    assert batch.start == 0
    logps = completion_logps(backbone, prompts, ids, mask).detach()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in backbone.trainable_parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
        each = sequence_kl(backbone, prompts, ids, mask).double()
        ratio = (completion_logps(backbone, prompts, ids, mask) - logps).double()
    prefix = torch.cat([torch.zeros(16, 1), ratio[:, :-1].cumsum(1)], 1).exp()
    measured = batch.measure()
    # float32, in batches of another size
    assert measured == pytest.approx(float((prefix * each).sum(0) @ (1 / prefix.sum(0))), rel=1e-4)
    assert abs(measured / float(each.sum(1).mean()) - 1) > 1e-3
    # From here the same policy: nothing has grown.
    again = BatchKL(backbone, batch.completions)
    assert again.measure() == again.start


def test_a_token_bias_is_measured_without_a_pass_of_the_policy():
    task = toy_task()
    backbone, prompts = task.backbone, encode_prompts(task.backbone.tokenizer, task.train_prompts[:8], 6)
    backbone.set_token_bias(torch.zeros(backbone.vocab_size))
    batch = BatchKL(backbone, [(prompts, *generate(backbone, prompts, 8, torch.Generator().manual_seed(0)))])
    backbone.set_token_bias(torch.randn(backbone.vocab_size, generator=torch.Generator().manual_seed(1)))
    assert batch.measure(same_adapter=True) == batch.measure() > 0.1


# ---- training ----
def trained(method, rate, folder, steps=6):
    args = TrainConfig(
        method=method, max_prompt_length=6, truncation="right", raw_prompts=True, max_completion_length=8,
        min_completion_length=8, per_device_train_batch_size=128, learning_rate=rate, lr_scheduler_type="constant",
        seed=0, use_cpu=True, max_steps=steps, target_kl=0.5, save_strategy="no",
        kl_eval_prompts=200, eval_strategy="no", **OWN[method],
    )  # fmt: skip
    return run_training(args, toy_task(), output_dir=folder).history


@pytest.mark.parametrize(("method", "rate"), [("ste", 3e-3), ("ste", 2e-2), ("ppo", 2e-2)])
def test_training_ends_on_its_budget_at_any_rate(method, rate, tmp_path):
    history = trained(method, rate, tmp_path)
    steps = [row for row in history if "train/kl" in row]
    assert [row["train/kl_budget"] for row in steps] == pytest.approx([0.5 * (s / 6) ** 2 for s in range(1, 7)])
    assert all(0 < row["train/kl_scale"] <= LONGEST for row in steps)
    # A batch's standard error is 7 percent here, the evaluation's 5.
    assert history[-1]["val/kl"] * 8 == pytest.approx(0.5, rel=0.25)


class _Push(TrainerCallback):
    """Moves the adapter far away, as a batch that says nothing of other completions may."""

    def on_step_begin(self, args, state, control, model, **_):
        for name, p in model.named_parameters():
            if state.global_step == 4 and "lora_B" in name:
                p.data.mul_(6)


def test_a_policy_far_beyond_its_budget_is_drawn_back(tmp_path):
    task = toy_task()
    trainer = toy_trainer(
        task, tmp_path, task.reward_model, rows=200, callbacks=[_Push()], num_generations=4, max_steps=9,
        per_device_train_batch_size=64, target_kl=0.5, beta=0.0, kl_eval_prompts=200, eval_strategy="steps",
        eval_steps=1, logging_steps=1,
    )  # fmt: skip
    trainer.train()
    history = {row["step"]: {} for row in trainer.state.log_history}
    for row in trainer.state.log_history:
        history[row["step"]] |= row
    assert history[5]["kl_scale"] == 0  # the step, along which KL would be measured wrongly, is left out
    # Completions of a policy so far away say little of what it is like near; those of the next step more.
    assert history[5]["eval_kl"] * 8 < 0.5
    assert history[7]["eval_kl"] * 8 == pytest.approx(history[7]["kl_budget"], rel=0.5)
    assert history[9]["eval_kl"] * 8 == pytest.approx(0.5, rel=0.25)  # as above
