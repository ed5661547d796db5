"""Runs along scored text: where they land, what they cost, how they go on, what they refuse."""

import random

import pytest
import torch
from transformers import TrainerCallback

from grade.errors import InputError
from grade.models.scoring import sequence_kl
from grade.training.config import GradeConfig
from grade.training.loop import GradeTrainer
from grade.training.toy import toy_reviews, toy_task

TEXTS = [{"text": review.text} for review in toy_reviews(200, seed=7)]


CALLS = []


def more_w_than_s(completions, **_):
    CALLS.extend(completions)
    return [float(text.count("w") - text.count("s")) for text in completions]


def trainer(output, reward=more_w_than_s, texts=TEXTS, task=None, **changes):
    CALLS.clear()
    task = task or toy_task(pretrain_steps=60)
    values = dict(
        method="offline", max_prompt_length=6, truncation="right", max_completion_length=8, min_completion_length=8,
        per_device_train_batch_size=32, max_steps=24, learning_rate=1e-2, target_kl=1.0, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, raw_prompts=True,
    )  # fmt: skip
    args = GradeConfig(str(output), **values | changes)
    rows = [{"prompt": text, "tone": "sad"} for text in task.train_prompts]
    return GradeTrainer(task.backbone, reward, args, rows, rows[:64], texts=texts)


def test_a_run_lands_on_its_kl_and_raises_the_reward_without_samples(tmp_path):
    run = trainer(tmp_path)
    before = run.evaluate()["eval_reward"]
    evaluated = len(CALLS)
    run.train()
    texts, steering = run.method.texts, run.method.steering
    assert steering.samples == 64
    assert len(CALLS) - evaluated == len(texts) + steering.samples
    assert run.evaluate()["eval_reward"] > before + 0.2
    prompts = run.encode([{"prompt": text} for text in toy_task().validation_prompts[:128]])
    own = run.method.sample(prompts, torch.Generator().manual_seed(5))
    kl = sequence_kl(run.backbone, own.prompts, own.ids, own.mask).sum(1)
    assert float(kl.mean()) == pytest.approx(1.0, rel=0.25)  # of 40 completions, KL has an error of some 6 %


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"texts": None}, "texts: got None; allowed: text to train along"),
        ({"target_kl": None}, "beta: got 0.0; allowed: above 0, or a target_kl"),
        ({"method": "rloo", "num_generations": 4, "target_kl": None}, "texts: .*none with method rloo"),
        ({"distil_families": ["trunk"]}, "distil_families: got 'trunk'; allowed: 'counts' or 'bag'"),
        ({"texts": "reference:9000"}, "texts: got 'reference:9000'; allowed: at most most_texts = 8192"),
        ({"own_completions": 2}, "own_completions: got 2"),
        ({"texts": None, "method": "rloo", "most_texts": 32}, "most_texts: .*: only distilled, offline"),
    ],
)
def test_what_is_refused(tmp_path, changes, says):
    with pytest.raises(InputError, match=says):
        trainer(tmp_path, **changes)


def test_a_reward_that_texts_do_not_explain_is_refused_before_the_first_step(tmp_path):
    draw = random.Random(3).random

    def noise(completions, **_):
        return [draw() for _ in completions]

    run = trainer(tmp_path, noise)
    with pytest.raises(InputError, match="texts: got .* that explain -?0.* of the reward on other prompts"):
        run.train()
    assert run.state.global_step == 0


def falls_once_training_began(completions, trainer_state=None, **_):
    sign = -1 if trainer_state is not None and trainer_state.global_step else 1
    return [sign * reward for reward in more_w_than_s(completions)]


def test_auto_begins_along_texts_and_goes_on_with_own_completions(tmp_path):
    run = trainer(tmp_path, method="auto", max_steps=16)
    before = run.evaluate()["eval_reward"]
    run.train()
    assert run.evaluate()["eval_reward"] > before + 0.2
    samples = [row["num_samples"] for row in run.state.log_history if "num_samples" in row]
    assert samples == [0, 8, 8, 16, 16, 24, 24, *(64 + 32 * step for step in range(9))]
    assert run.chosen["steps along the texts"].startswith("8 of 16, beta from")
    assert "64 own completions rise with the prediction" in run.chosen["transfer"]
    run.save_model()
    assert f"- transfer: {run.chosen['transfer']}" in (tmp_path / "README.md").read_text()


def test_auto_starts_over_without_texts_that_own_completions_disprove(tmp_path):
    run = trainer(tmp_path, falls_once_training_began, method="auto", max_steps=16)
    run.train()
    assert run.chosen["transfer"] == (
        "rewards of 24 own completions do not rise with the prediction: from step 7 on without texts, from the start"
    )
    figures = {row["step"]: row for row in run.state.log_history if "num_samples" in row}
    assert figures[6]["kl"] > 1e-3 > abs(figures[7]["kl"]) and figures[7]["num_samples"] == 24 + 32
    assert not figures[16].get("distilled/transfer")
    assert {int(state["step"]) for state in run.optimizer.state.values()} == {10}, "AdamW starts over too"


class Interrupted(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 9:
            raise KeyboardInterrupt


def test_a_trainer_goes_on_from_its_checkpoint_after_an_interruption(tmp_path):
    changes = dict(method="auto", max_steps=16, save_strategy="steps", save_steps=5)
    whole, again = (trainer(tmp_path / name, **changes) for name in ("whole", "again"))
    whole.train()
    again.add_callback(Interrupted)
    with pytest.raises(KeyboardInterrupt):
        again.train()
    again.remove_callback(Interrupted)
    again.train(resume_from_checkpoint=True)
    for one, other in zip(*(run.backbone.trainable_parameters() for run in (whole, again)), strict=True):
        assert torch.equal(one, other)


def test_rewards_that_disprove_the_texts_end_a_run_that_has_nothing_else(tmp_path):
    run = trainer(tmp_path, falls_once_training_began)
    with pytest.raises(InputError, match="24 own completions that do not rise with what they predict"):
        run.train()
