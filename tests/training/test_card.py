"""A model card says what was trained and what came of it, and nothing of the machine."""

import shlex
from dataclasses import fields

import numpy as np
import pytest
from huggingface_hub import ModelCard

from grade.training.config import GradeConfig, TrainConfig
from grade.training.evaluate import Evaluation
from grade.training.run import RunResult, write_run
from grade.training.toy import toy_task
from grade.training.trainer import GradeTrainer


def evaluation(rewards, completions, **parts):
    kl = np.zeros(len(rewards)) + 0.5
    parts = {name: np.array(values) for name, values in parts.items()}
    values = np.array(rewards, float)
    return Evaluation(["One", "Two"], completions, values, np.full(len(values), np.nan), kl, 0.5, parts)


TASK = toy_task()
BEFORE = evaluation([0.0, 1.0], ["first", "second"])
AFTER = evaluation([2.0, 5.0], ["```\nthird", "x" * 1000 + "\x1b"])


def card_of(folder, before=BEFORE, after=AFTER, trained_with="", **changes):
    values = {"method": "rloo", "model": "someone/model", "output_dir": str(folder / "run"), "reward": "hf:some/judge",
              "train_dataset": "some/texts:train", "eval_dataset": "held_out.jsonl", "max_steps": 7}  # fmt: skip
    config = TrainConfig.parse(values | {"use_cpu": True} | changes)
    result = RunResult([{"samples": 1}], before, after, seconds=1.0, step=7, method=trained_with)
    write_run(folder / "run", config, TASK, result)
    return config, ModelCard.load(folder / "run" / "README.md")


def test_the_metadata_is_what_the_hub_reads(tmp_path):
    _, card = card_of(tmp_path)
    about = card.data.to_dict()
    assert about["base_model"] == "someone/model" and about["library_name"] == "peft"
    assert about["tags"] == ["grade", "reward-gradients"] and about["datasets"] == ["some/texts"]
    assert about["pipeline_tag"] == "text-generation" and about["base_model_relation"] == "adapter"


def test_figures_are_means_with_errors_and_the_change_is_paired(tmp_path):
    """Before 0, 1 and after 2, 5: differences 2 and 4."""
    text = card_of(tmp_path)[1].text
    assert "| reward | 0.5 ± 0.5 (n=2) | 3.5 ± 1.5 (n=2) | 3 ± 1 (n=2) |" in text
    assert "| KL to the base, nats per token | 0.5 ± 0 (n=2) | 0.5 ± 0 (n=2) | 0 ± 0 (n=2) |" in text
    assert "gold judge" not in text and "steps: 7, of 8 completions" in text
    assert "LoRA of rank 4, alpha 8, on k_proj, o_proj, q_proj, v_proj" in text  # the adapter that was trained


def test_each_reward_of_several_has_a_row_if_it_applied_everywhere(tmp_path):
    parts = [evaluation([1.0, 2.0], ["a", "b"], good=[1.0, 2.0], rare=[np.nan, 1.0]) for _ in range(2)]
    text = card_of(tmp_path, *parts)[1].text
    assert "| reward `good` | 1.5 ± 0.5 (n=2) | 1.5 ± 0.5 (n=2) | 0 ± 0 (n=2) |" in text and "`rare`" not in text
    parts = [evaluation([1.0, 2.0], ["a", "b"], good=[1.0, 2.0]) for _ in range(2)]
    assert "`good`" not in card_of(tmp_path, *parts)[1].text  # the only one is the reward


def test_samples_cannot_leave_their_block_and_are_short(tmp_path):
    text = card_of(tmp_path)[1].text
    assert "Before (reward 1):\n\n```text\nsecond\n```" in text
    assert "After (reward 2):\n\n````text\n```\nthird\n````" in text
    assert f"{'x' * 400} ...\n" in text and "x" * 401 not in text and "\x1b" not in text
    without = card_of(tmp_path, None, None, eval_dataset="")[1].text
    assert "## Samples" not in without and "## Figures" not in without and "held-out" not in without


@pytest.mark.parametrize("chosen", ["distilled", "ste"])
def test_what_auto_chose_is_named_and_the_command_says_auto(tmp_path, chosen):
    text = card_of(tmp_path, trained_with=chosen, method="auto")[1].text
    assert f"trained with `{chosen}` (" in text and "), which `auto` chose for its reward.\n" in text
    assert "--method auto" in text and ("2601.11574" in text) == (chosen == "ste")
    assert "`auto`" not in card_of(tmp_path, method="distilled")[1].text


def test_nothing_says_where_it_was_made(tmp_path):
    (tmp_path / "base").mkdir()
    files = {"model": "base", "reward": "rewards.py:short", "train_dataset": "mine.jsonl", "eval_dataset": "held.csv"}
    places = {name: str(tmp_path / file) for name, file in files.items()}
    _, card = card_of(tmp_path, **places, hub_token="secret", chat_template_kwargs={"file": str(tmp_path / "x")})
    assert str(tmp_path) not in card.content and "secret" not in card.content
    assert "the local model `base`" in card.text and "base_model" not in card.data.to_dict()
    assert "`rewards.py:short`" in card.text and "`mine.jsonl`" in card.text and "datasets" not in card.data.to_dict()


def test_the_command_makes_the_same_run(tmp_path):
    changes = {"reward": ["rewards.py:short", "hf:some/judge"], "reward_weights": [1.0, 0.5], "learning_rate": 1e-5,
               "lora": {"r": 2, "alpha": 4}, "model_init_kwargs": None, "seed": 3, "raw_prompts": True,
               "eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "constant", "report_to": "none",
               "truncation": "left", "base_name": "true"}  # fmt: skip
    config, card = card_of(tmp_path, **changes)
    command = card.text.split("```bash\n")[1].split("\n```")[0].replace("\\\n", "")
    words = iter(shlex.split(command)[2:])
    options = {"--method": [], "--reward": [], "--set": [], "--output-dir": []}
    for word in words:
        options[word].append(next(words))
    assert options["--output-dir"] == ["run"]
    given = {"method": options["--method"][0], "reward": options["--reward"], "output_dir": "run"}
    again = TrainConfig.load([], [*options["--set"], *(f"{name}={value}" for name, value in given.items())])
    differing = {f.name for f in fields(again) if f.init and getattr(again, f.name) != getattr(config, f.name)}
    assert differing <= {"output_dir", "run_name"} and again.base_name == "true"


def test_the_adapters_folder_has_the_same_card_instead_of_pefts_empty_one(tmp_path):
    run = card_of(tmp_path)[1]
    adapter = ModelCard.load(tmp_path / "run" / "adapter" / "README.md")
    assert 'from_pretrained("run/adapter")' in run.text and 'from_pretrained("run/adapter")' in adapter.text
    assert adapter.data.to_dict() == run.data.to_dict() and "More Information" not in adapter.text


def test_the_trainer_writes_its_card(tmp_path):
    task = toy_task()
    rows = [{"prompt": text} for text in task.train_prompts[:12]]
    args = GradeConfig(
        method="rloo", output_dir=str(tmp_path / "run"), max_steps=1, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=4, eval_on_start=True, eval_on_end=True, save_strategy="no", use_cpu=True,
        raw_prompts=True, report_to="none",
    )  # fmt: skip
    trainer = GradeTrainer(task.backbone, [lambda completions, **_: [float(len(c)) for c in completions]], args,
                           rows, rows[:3])  # fmt: skip
    trainer.train()
    trainer.create_model_card(language="en", license="mit", tags="mine", dataset="Toys", dataset_tags="some/toys")
    card = ModelCard.load(tmp_path / "run" / "README.md")
    about = card.data.to_dict()
    assert about["license"] == "mit" and about["language"] == "en" and about["datasets"] == ["some/toys"]
    assert about["tags"] == ["grade", "reward-gradients", "mine"]
    assert "| reward |" in card.text and card.text.count("(n=3)") >= 3
    assert "prompts: Toys, 12 rows" in card.text and "held-out prompts: 3 rows" in card.text
    assert "rank 4" in card.text and "RLOO" in card.text and "# run" in card.text
