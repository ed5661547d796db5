"""Runs with a teacher: alone, beside a reward; who may be one."""

import pytest
import torch
from conftest import make_prompts, perturb_adapter, save_toy_base
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.base import FrozenBase
from grade.models.scoring import predicting_hidden
from grade.training.config import GradeConfig
from grade.training.loop import GradeTrainer
from grade.training.teacher import make_teacher
from grade.training.toy import toy_task


def more_w_than_s(completions, **_):
    return [float(text.count("w") - text.count("s")) for text in completions]


def trainer(output, reward=None, **changes):
    task = toy_task(pretrain_steps=60)
    values = dict(
        max_prompt_length=6, truncation="right", max_completion_length=8, per_device_train_batch_size=16, max_steps=12,
        learning_rate=1e-2, use_cpu=True, save_strategy="no", raw_prompts=True,
    )  # fmt: skip
    rows = [{"prompt": text, "tone": "sad"} for text in task.train_prompts]
    args = GradeConfig(str(output), **values | changes)
    return GradeTrainer(task.backbone, reward, args, rows, rows[:64])


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A folder of an adapter that says "w"."""
    folder = tmp_path_factory.mktemp("taught")
    run = trainer(folder, more_w_than_s, method="rloo", num_generations=8, max_steps=10)
    run.train()
    run.backbone.save_adapter(folder / "adapter")
    return str(folder / "adapter")


@pytest.mark.parametrize("changes", [{}, {"method": "teacher", "teacher_beta": 0.5}], ids=str)
def test_alone_it_is_learned_along_own_completions(tmp_path, taught, changes):
    run = trainer(tmp_path, teacher=taught, **changes)
    before = run.evaluate()["eval_reward"]
    run.train()
    assert run.config.method == "teacher" and (changes or "value of every token" in run.chosen["method"])
    assert run.evaluate()["eval_reward"] > before / 2  # minus the divergence, which at least halves
    assert {"reward", "loss"} <= run.state.log_history[1].keys() and "kl" not in run.state.log_history[1]
    assert max(row.get("num_samples", 0) for row in run.state.log_history) == 192


def test_a_merged_adapter_has_for_itself_only_the_weights_that_it_changed(tmp_path):
    task, other = toy_task(), perturb_adapter(toy_task().backbone, seed=4)
    base, prompts, ids = task.backbone, make_prompts(3), torch.tensor([[5, 6], [8, 9], [11, 3]])
    changed = {name.replace(".base_layer", "") for name, _ in base.model.named_parameters() if ".base_layer" in name}
    want = predicting_hidden(FrozenBase(merged := other.peft.merge_and_unload()), prompts, ids)
    merged.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    teacher = make_teacher(tmp_path, base)
    shared = {p.data_ptr() for p in base.model.parameters()}
    assert {name for name, p in teacher.model.model.named_parameters() if p.data_ptr() not in shared} == changed
    with base.merged():  # which puts other values in the place of the base's
        assert teacher.hidden(prompts, ids).equal(want)


def test_beside_a_reward_it_is_one_of_its_parts(tmp_path, taught):
    run = trainer(
        tmp_path, more_w_than_s, method="rloo", num_generations=8, teacher=taught, teacher_weight=0.5, max_steps=2
    )
    run.train()
    row = next(row for row in run.state.log_history if "loss" in row)
    parts = row["rewards/more_w_than_s/mean"] + 0.5 * row["rewards/teacher/mean"]
    assert row["reward"] == pytest.approx(parts, rel=1e-5) and row["rewards/teacher/mean"] < 0


def test_a_context_is_for_the_teacher_alone_and_a_run_goes_on_where_it_was(tmp_path):
    settings = dict(teacher="base", teacher_context="a {tone} film ", save_strategy="steps", save_steps=2, max_steps=4)
    whole, resumed = (trainer(tmp_path / "one", **settings) for _ in range(2))
    whole.train()
    resumed.train(str(tmp_path / "one" / "checkpoint-2"))
    rows = [[row["reward"] for row in run.state.log_history if "reward" in row] for run in (whole, resumed)]
    assert rows[0][0] < 0 and len(rows[0]) == 4 and rows[0] == rows[1]
    other = trainer(tmp_path / "one", **settings | {"teacher_context": "a good film "})
    with pytest.raises(InputError, match="teacher_context: got"):
        other.train(str(tmp_path / "one" / "checkpoint-2"))


def test_a_student_of_a_teacher_that_stops_with_another_token_has_both_ends(tmp_path):
    """Compared token by token it would unlearn its own."""
    tokenizer = save_toy_base(tmp_path).backbone.tokenizer
    student, teacher = (AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    teacher.generation_config.eos_token_id = 1
    args = GradeConfig(str(tmp_path), method="teacher", max_completion_length=8, use_cpu=True)
    run = GradeTrainer(student, None, args, [{"prompt": "a"}], processing_class=tokenizer, teacher=teacher)
    assert run.backbone.eos_token_ids == (0, 1) and "any of the tokens 0, 1" in run.chosen["teacher"]


def test_a_model_with_other_tokens_is_no_teacher(tmp_path):
    tokenizer, added = save_toy_base(tmp_path).backbone.tokenizer, tmp_path / "added"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer.add_tokens("<added>")
    for folder in (tmp_path, added):  # the teacher has no such token; it has, but no row of its table
        model.save_pretrained(folder)
    tokenizer.save_pretrained(added)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    policy, alone = Backbone(model, tokenizer), AutoModelForCausalLM.from_pretrained(tmp_path)
    alone.name_or_path = ""
    for given in (tmp_path, added, alone):
        with pytest.raises(InputError, match=f"token {len(tokenizer) - 1}, '<added>', is not in both"):
            make_teacher(given, policy)
