"""`grade show` and `grade merge` on a run on disk; its adapter loads from anywhere."""

import json
import os

import pandas as pd
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade.cli.main import main
from grade.training.toy import toy_task

REWARDS = """
def length(completions, **columns):
    return [len(text) / 10 for text in completions]

def vowels(completions, **columns):
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A project whose base is named by a relative path, with a run of 4 steps in it."""
    root = tmp_path_factory.mktemp("place")
    task = toy_task()
    task.backbone.peft.unload().save_pretrained(root / "base")
    task.backbone.tokenizer.save_pretrained(root / "base")
    for name, prompts in (("train", task.train_prompts[:8]), ("held_out", task.validation_prompts[:6])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    (root / "rewards.py").write_text(REWARDS)
    values = {
        "model": "base", "train_dataset": "train.jsonl", "eval_dataset": "held_out.jsonl", "lora": {"r": 2, "alpha": 4},
        "max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2, "learning_rate": 0.1,
        "max_completion_length": 6, "log_completions": True, "use_cpu": True, "seed": 5,
    }  # fmt: skip
    (root / "train.yaml").write_text(json.dumps(values))
    here = os.getcwd()
    os.chdir(root)
    try:
        rewards = ["--reward", "rewards.py:length", "--reward", "rewards.py:vowels"]
        options = ["--config", "train.yaml", "--method", "rloo", "--output-dir", "run"]
        assert main(["train", *options, *rewards]) == 0
    finally:
        os.chdir(here)
    return root


def show(capsys, *arguments):
    code = main(["show", *map(str, arguments)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def test_a_run_is_shown_with_its_history_and_completions(place, capsys):
    blocks = show(capsys, place / "run", "--rows", "2").split("\n\n")
    history = pd.read_csv(place / "run" / "history.csv").set_index("step")
    lines = [line.split() for line in blocks[0].splitlines()[1:]]
    assert [line[0] for line in lines] == ["0", "1", "2", "3", "4"]
    columns = ("train/reward", "train/kl", "val/reward_mean", "val/reward_stderr")
    assert lines[4][1:] == [f"{history.loc[4, name]:.4g}" for name in columns]
    assert [block.splitlines()[0] for block in blocks[1:]] == [
        "completions, step 4: 2 of 4 completions", "eval, step 4: 2 of 6 completions"
    ]  # fmt: skip
    table = pd.read_parquet(place / "run" / "completions" / "eval_00004.parquet")
    words = blocks[2].splitlines()[2].split()
    assert words[-3:] == [f"{table[name][0]:.4g}" for name in ("reward", "rewards/length", "rewards/vowels")]


@torch.no_grad()
def test_the_adapter_loads_from_any_folder_and_merges_to_the_same_logits(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # the run named its base "base", from its own folder
    ids = AutoTokenizer.from_pretrained(place / "base")("The film was a delight.", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(place / "base")
    bare = base(ids).logits
    want = PeftModel.from_pretrained(base, place / "run" / "adapter")(ids).logits
    assert (want - bare).norm() > 1e-3 * want.norm()
    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(place / "run" / "adapter")(ids).logits, want)
    assert main(["merge", str(place / "run"), "out"]) == 0
    assert capsys.readouterr().out == "wrote out (float32)\n"
    got = AutoModelForCausalLM.from_pretrained("out")(ids).logits
    assert (got - want).norm() <= 1e-5 * want.norm()  # the requirement; float32 sums in another order
