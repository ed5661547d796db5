"""Training runs in processes forked from one that has imported everything, so that each takes as long as training."""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import zlib
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors.torch import load_file

from grade.gradients.methods import AUTO
from grade.training.config import GradeConfig, TrainConfig
from grade.training.loop import GradeTrainer
from grade.training.toy import toy_task


def toy_project(root: Path) -> dict:
    """Base, reward model and prompts on disk; the settings that name them."""
    task = toy_task(lora=None)
    with task.backbone.reference():
        bare = task.backbone.peft.unload()
    bare.save_pretrained(root / "base")
    task.backbone.tokenizer.save_pretrained(root / "base")
    task.reward_model.save(root / "bag")
    for name, prompts in (("train", task.train_prompts[:20]), ("held_out", task.validation_prompts[:16])):
        lines = [json.dumps({"prompt": text}) for text in prompts]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "model": str(root / "base"), "reward": str(root / "bag"), "gold": "", "use_cpu": True,
        "train_dataset": str(root / "train.jsonl"), "eval_dataset": str(root / "held_out.jsonl"),
        "lora": {"r": 2, "alpha": 4}, "max_prompt_length": 6, "truncation": "right", "max_completion_length": 8,
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 7, "learning_rate": 1e-2,
        "beta": 0.1, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3, "logging_steps": 3, "seed": 3,
        "kl_eval_prompts": 8, "per_device_eval_batch_size": 4, "save_total_limit": 2, "lr_scheduler_type": "linear",
        "base_name": "base",
    }  # fmt: skip


def toy_trainer(task, output, reward=None, rows=8, held_out=None, callbacks=None, **changes):
    """A trainer of the toy task's policy on some of its prompts, without checkpoints."""
    values = dict(
        method="rloo", max_prompt_length=6, truncation="right", raw_prompts=True, max_completion_length=8,
        per_device_train_batch_size=4, max_steps=2, learning_rate=1e-2, use_cpu=True, seed=0, save_strategy="no",
        report_to="none",
    ) | changes  # fmt: skip
    args = GradeConfig(str(output), **GradeConfig.values_for(values["method"], values))
    prompts = [{"prompt": text} for text in task.train_prompts[:rows]]
    return GradeTrainer(task.backbone, reward, args, prompts, held_out or prompts, callbacks=callbacks)


def noise(completions, **_):
    """A reward that no token explains."""
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]


def settings(method: str, common: dict, output: Path) -> TrainConfig:
    """A run of a method; with several updates a step where it has them."""
    own = {"gumbel_topk": 16, "num_generations": 4}
    own |= {} if method == AUTO else {"passes_per_step": 2}  # a setting of grpo means grpo
    values = TrainConfig.values_for(method, common | own)
    return TrainConfig.parse(values | {"output_dir": str(output)})


def in_child(work) -> int:
    """Fork, do the work there; the child's process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    gc.freeze()  # accelerate collects garbage at the start of training, and would search all that was imported
    torch.set_num_threads(1)  # the parent's other threads are not here, and would be waited for
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")
        work()
        code = 0
    except BaseException:
        traceback.print_exc(file=open(os.environ.get("INTERRUPTED_LOG", os.devnull), "a"))
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """The exit code, negative for a signal."""
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def assert_equal_adapters(one: Path, two: Path, tolerance: float = 1e-5) -> None:
    """Two runs trained the same adapter, but for the order of sums in float32."""
    first, second = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (one, two))
    for name, value in first.items():
        assert (second[name] - value).norm() <= tolerance * value.norm(), name
