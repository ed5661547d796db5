"""Defaults of a training run's settings, and which of transformers' values are taken."""

import pytest

from grade.errors import InputError
from grade.training.config import GradeConfig, TrainConfig

OURS = {
    "beta": 0.0, "target_kl": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
    "repetition_penalty": 1.0, "use_vllm": False, "reward_weights": None, "reward_scope": "prompt_and_completion",
    "max_prompt_length": None, "truncation": "error", "raw_prompts": False, "chat_template_kwargs": None,
    "shuffle_dataset": True, "eval_on_start": False, "eval_on_end": False, "eval_prompts": None,
    "final_eval_prompts": None, "kl_eval_prompts": 64, "eval_noise_block": 64, "log_completions": False,
    "model_init_kwargs": None, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1,
    "seed": 42, "learning_rate": 2e-4, "weight_decay": 0.0, "max_grad_norm": 1.0, "optim": "adamw_torch",
    "logging_steps": 1, "per_device_eval_batch_size": 64, "dataloader_pin_memory": False,
    "remove_unused_columns": False, "num_train_epochs": 3.0, "report_to": "none",
}  # fmt: skip
FILES = OURS | {
    "model": "models/backbone", "dtype": "float32", "attention": "auto", "base_name": None,
    "reward": "models/reward/backbone/bag", "gold": "", "train_dataset": "data/reviews/policy.jsonl",
    "eval_dataset": "data/reviews/validation.jsonl", "samples": 8, "eval_on_start": True, "eval_on_end": True,
    "num_train_epochs": 1.0, "disable_tqdm": None,
}  # fmt: skip
OUTSIDE = {
    "beta": [-0.1], "temperature": [0.0], "weight_decay": [-0.1], "max_grad_norm": [-1.0], "learning_rate": [0.0, 1e31],
    "seed": [-1, 2**32], "eval_prompts": [1], "final_eval_prompts": [1], "kl_eval_prompts": [-1],
    "eval_noise_block": [0], "per_device_train_batch_size": [0], "gradient_accumulation_steps": [0],
    "max_steps": [-2, 0], "per_device_eval_batch_size": [0], "max_prompt_length": [0], "logging_steps": [0],
    "warmup_steps": [-1], "dataloader_num_workers": [-1], "data_seed": [-1, 2**32], "top_p": [0.9], "top_k": [1],
    "use_vllm": [True], "remove_unused_columns": [True], "fp16": [True], "target_kl": [1.0],
}  # fmt: skip
EDGES = {
    "weight_decay": 0.0, "max_grad_norm": 0.0, "seed": 2**32 - 1, "eval_prompts": 2, "kl_eval_prompts": 0,
    "data_seed": 0, "warmup_steps": 0, "logging_steps": 0.5,
}  # fmt: skip


def test_defaults():
    assert {name: GradeConfig.default_of(name) for name in OURS} == OURS
    assert {name: TrainConfig.default_of(name) for name in FILES} == FILES


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OUTSIDE.items() for value in values])
def test_values_out_of_range_are_refused(name, value, tmp_path):
    with pytest.raises(InputError, match=name):
        GradeConfig(output_dir=str(tmp_path), use_cpu=True, **{name: value})


@pytest.mark.parametrize("name", EDGES)
def test_values_at_the_edge_are_taken(name, tmp_path):
    assert getattr(GradeConfig(output_dir=str(tmp_path), use_cpu=True, **{name: EDGES[name]}), name) == EDGES[name]


def test_warmup_is_shorter_than_the_run(tmp_path):
    with pytest.raises(InputError, match="warmup_steps: got 3; allowed: less than max_steps = 3"):
        GradeConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=3, warmup_steps=3)
    assert GradeConfig(output_dir=str(tmp_path), use_cpu=True, max_steps=3, warmup_steps=2).warmup_steps == 2


@pytest.mark.parametrize(
    ("method", "prompts", "completions"), [("rloo", 1, 8), ("grpo", 1, 8), ("remax", 8, 16), ("ste", 8, 8)]
)
def test_a_microbatch_holds_whole_prompts_and_greedy_completions_come_on_top(method, prompts, completions, tmp_path):
    config = GradeConfig(output_dir=str(tmp_path), use_cpu=True, method=method)
    assert (config.batch_prompts, config.batch_completions) == (prompts, completions)
