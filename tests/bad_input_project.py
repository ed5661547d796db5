"""The small project on which tests/test_bad_input.py runs every command: good inputs, of which a case spoils one."""

import json
import os
import shutil
from pathlib import Path

WARM = ("grade.training.merge", "grade.experiments.compare.measure.peers", "datasets", "pyarrow.parquet", "papermill",
        "grade.experiments.validation.measure.tables", "jsonschema", "dvc.repo", "nbstripout",
        "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert")  # fmt: skip
"""Imported before the processes fork, besides the commands."""

REWARDS = '''
"""Rewards, most of them wrong."""
from grade.rewards.verifiers import exact_answer, matches

number = 3
answer = exact_answer("answer")

def length(completions, **columns):
    return [len(text) / 10 for text in completions]

def raises(completions, **columns):
    raise KeyError("oh\\nno")

def nan(completions, **columns):
    return [float("nan")] * len(completions)

def inf(completions, **columns):
    return [float("inf")] * len(completions)

def short(completions, **columns):
    return [1.0]

def none(completions, **columns):
    return None

def words(completions, **columns):
    return ["good"] * len(completions)

def number_only(completions, **columns):
    return 1.0

def huge(completions, **columns):
    return [10**400] * len(completions)

def needs_more(completions, missing):
    return [1.0] * len(completions)

def positional(a, b):
    return [1.0]

def leaves(completions, **columns):
    raise SystemExit(3)

async def late(completions, **columns):
    raise RuntimeError("too late")

def generator(completions, **columns):
    yield 1.0

class Reward:
    pass
'''

TRAIN = {
    "model": "base", "train_dataset": "prompts.jsonl", "eval_dataset": "held_out.jsonl", "reward": "rewards.py:length",
    "method": "rloo", "lora": {"r": 2, "alpha": 4}, "max_steps": 1, "per_device_train_batch_size": 4,
    "num_generations": 2, "max_completion_length": 4, "use_cpu": True, "samples": 1, "report_to": "none", "seed": 0,
    "kl_eval_prompts": 2, "final_eval_prompts": 4,
}  # fmt: skip
NOTEBOOK = {
    "cells": [
        {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {"tags": ["parameters"]}, "outputs": [],
         "source": "seed = 0\nrate = 0.1\nnames = ['a']\nruns_dir = ''"},
    ],
    "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
    "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip


def make(root):
    """Write the project.

    Args:
        root: Its folder, which does not exist yet.
    """
    import torch
    from conftest import save_toy_base
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from grade.cli.main import main
    from grade.data.reviews import prompt_text
    from grade.training.toy import toy_reviews

    root = Path(root)
    root.mkdir(parents=True)
    os.chdir(root)
    task = save_toy_base(root / "base")
    task.reward_model.save(root / "bag")
    task.judge.save(root / "judge.npz")
    tokenizer = AutoTokenizer.from_pretrained("base")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    config = BertConfig(vocab_size=len(tokenizer), num_labels=2, max_position_embeddings=64, pad_token_id=1, **sizes)
    BertForSequenceClassification(config).save_pretrained("classifier")
    tokenizer.save_pretrained("classifier")
    Path("reviews").mkdir()
    for seed, split in enumerate(("reward", "policy", "validation", "test", "gold")):
        rows = [review._asdict() | {"prompt": prompt_text(review.text)} for review in toy_reviews(40, seed)]
        Path(f"reviews/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("prompts", "held_out"):
        rows = [{"prompt": f"The film {i} was", "answer": "x"} for i in range(8)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reviews.csv").write_text(
        "text,label\n" + "".join(f"{review.text} {i},{review.label}\n" for i, review in enumerate(toy_reviews(300)))
    )
    Path("rewards.py").write_text(REWARDS)
    Path("train.yaml").write_text(json.dumps(TRAIN))  # JSON is YAML
    Path("small.ipynb").write_text(json.dumps(NOTEBOOK))
    here = Path(__file__).parents[1]
    Path("params/cpu").mkdir(parents=True)
    for name in ("dvc.yaml", "params/cpu/suite.yaml"):
        shutil.copy(here / name, name)
    Path(".dvc/tmp").mkdir(parents=True)
    Path(".dvc/config").write_text("[core]\n    no_scm = true\n    analytics = false\n    check_update = false\n")
    assert main(["train", "--config", "train.yaml", "--output-dir", "run"]) == 0
    shutil.rmtree("__pycache__", ignore_errors=True)
