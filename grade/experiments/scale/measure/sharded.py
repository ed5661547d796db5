"""A base divided between two processes against a whole one: what it trains, what each process holds, and its peak."""

import json
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from grade.gradients.methods import GROUPED, OPTIONS
from grade.memory.compat import divide
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace
from grade.models.sharding import held_bytes
from grade.rewards.model import HeadSettings, RewardModel
from grade.training.config import FSDP2, SHARDING, TrainConfig
from grade.training.load import load_task
from grade.training.run import run_training
from grade.training.toy import toy_task

_SMALL = dict(model="tiny", dtype="float32", batch_size=4, prompt_tokens=8, max_new_tokens=8, gumbel_topk=16)
_GROUPS = {name: value for name, value in _SMALL.items() if name != "gumbel_topk"} | {"num_generations": 4}
STEPS: dict[str, StepConfig] = {
    "replay": StepConfig(**_SMALL),
    "replay, layers recomputed": StepConfig(**_SMALL, gradient_checkpointing=True),
    "replay, trunk reward": StepConfig(**_SMALL, method="gumbel", reward="trunk"),
    "replay, bfloat16": StepConfig(**_SMALL | {"dtype": "bfloat16", "batch_size": 16}),
    "unrolled": StepConfig(**_SMALL | {"max_new_tokens": 3}, method="ste_legacy"),
    "grpo": StepConfig(**_GROUPS, method="grpo"),
    "ppo": StepConfig(**_GROUPS | {"num_generations": None}, method="ppo", gradient_checkpointing=True),
    "SmolLM2, replay": StepConfig(
        **_SMALL | {"model": "smollm2-135m", "batch_size": 2, "max_new_tokens": 4}, gradient_checkpointing=True
    ),
}
"""Steps whose traced peaks are held against real ones."""
REPEATS = 3
"""Runs of a real step; the median of their peaks counts. Now and then a thread of gloo still holds a buffer that has
arrived when the next one is allocated."""


def sharded_memory(names: Sequence[str]) -> list[dict[str, Any]]:
    """Peaks and received bytes of one of two processes that divide the base, traced alone and counted in real ones."""
    with tempfile.TemporaryDirectory() as place:
        _in_processes(2, track, place, tuple(names))
        rows = []
        for name in names:
            traced = trace(STEPS[name], device="cpu", processes=2)
            whole = trace(STEPS[name], device="cpu").peak
            for rank in range(2):
                peak, received = json.loads((Path(place) / f"{rank}.json").read_text())[name]
                rows.append({
                    "step": name, "rank": rank, "traced": traced.peak, "tracked": peak,
                    "rel_error": traced.peak / peak - 1, "traced_received": traced.received,
                    "tracked_received": received, "whole": whole,
                })  # fmt: skip
        return rows


def track(place: str, names: Sequence[str]) -> None:
    """Run steps on random weights, their base divided among gloo processes, of which this is one."""
    dist.init_process_group("gloo")
    counted = {}
    for name in names:
        torch.manual_seed(0)  # the same base on every process
        backbone, others = build(STEPS[name], device="cpu")
        divide(backbone)
        step = make_step(STEPS[name], backbone, others)
        trackers = [run_tracked(step) for _ in range(REPEATS)]
        counted[name] = [sorted(tracker.peak for tracker in trackers)[REPEATS // 2], trackers[0].received]
    (Path(place) / f"{dist.get_rank()}.json").write_text(json.dumps(counted), encoding="utf-8")
    dist.destroy_process_group()


def fsdp2_differences(steps: int, methods: Sequence[str]) -> list[dict[str, Any]]:
    """Every method trained in one process with the whole base, and in two gloo processes with half of it each, float64.

    Both have the same two microbatches a step. What may go wrong between processes is in it: a reward on the embedding
    table and one through the base, recomputed layers, two hops, completions that end early. The difference is the
    largest ``|B - A| / |A|`` over the adapter's tensors; bytes are those that a process holds.
    """
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        common = _project(root) | {"max_steps": steps, "dtype": "float64"}
        runs = [_values(method, common) for method in methods]
        for processes in (1, 2):
            _in_processes(processes, _train, str(root), runs)
        return [_row(method, root) for method in methods]


def _in_processes(processes: int, work: Callable[..., None], *args: Any) -> None:
    """Do work in new processes that find each other on this machine, the base divided among them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    multiprocessing.spawn(_begin, (processes, port, work, args), processes)


def _begin(rank: int, processes: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    if processes > 1:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes), "RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank), SHARDING: FSDP2,
        }  # fmt: skip
    torch.set_num_threads(1)  # sums over several threads are in another order
    work(*args)


def _project(root: Path) -> dict[str, Any]:
    """A tiny base with two rewards and prompts on disk, and the settings that name them."""
    task = toy_task(lora=None)
    with task.backbone.reference():
        bare = task.backbone.peft.unload()
    bare.generation_config.eos_token_id = list(range(0, task.backbone.vocab_size, 2))  # completions end early
    bare.save_pretrained(root / "base")
    task.backbone.tokenizer.save_pretrained(root / "base")
    task.reward_model.save(root / "bag")
    torch.manual_seed(0)
    RewardModel("trunk", task.backbone, HeadSettings(dropout=0.0)).save(root / "trunk")
    rows = [json.dumps({"prompt": text}) for text in task.train_prompts[:40]]
    (root / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return {
        "model": str(root / "base"), "reward": [str(root / "bag"), str(root / "trunk")], "gold": "", "use_cpu": True,
        "train_dataset": str(root / "train.jsonl"), "eval_dataset": "", "lora": {"r": 4, "alpha": 8},
        "max_prompt_length": 8, "truncation": "right", "max_completion_length": 8, "per_device_train_batch_size": 8,
        "learning_rate": 1e-2, "beta": 0.1, "seed": 3, "hops": 2, "gradient_checkpointing": True, "gumbel_topk": 16,
        "output_dir": str(root / "run"), "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def _values(method: str, common: dict[str, Any]) -> dict[str, Any]:
    own = {"num_generations": 4} if method in GROUPED else {}
    own |= {"passes_per_step": 2} if method in OPTIONS["passes_per_step"] else {}
    return TrainConfig.values_for(method, common | own)


def _train(place: str, runs: Sequence[dict[str, Any]]) -> None:
    """Train every method, and write its adapter and what this process held."""
    for values in runs:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        config = TrainConfig.parse(values | {"gradient_accumulation_steps": 2 // processes})
        task = load_task(config, config.device)
        named = task.backbone.model.named_parameters()
        adapter = {name: p for name, p in named if p.requires_grad}
        held = held_bytes(task.backbone.model)
        run_training(config, task, lambda line: None)
        result = {"adapter": {name: p.detach() for name, p in adapter.items()}, "held": held}
        torch.save(result, Path(place) / f"{config.method}-{processes}-{config.process_index}.pt")


def _row(method: str, root: Path) -> dict[str, Any]:
    files = (root / f"{method}-{name}.pt" for name in ("1-0", "2-0", "2-1"))
    one, first, second = (torch.load(file, weights_only=True) for file in files)
    differences = [
        float((other["adapter"][name] - value).norm() / value.norm())
        for other in (first, second) for name, value in one["adapter"].items()
    ]  # fmt: skip
    adapter = sum(value.numel() * value.element_size() for value in one["adapter"].values())
    return {
        "method": method, "max_rel_diff": max(differences), "bytes": one["held"],
        "bytes_0": first["held"], "bytes_1": second["held"], "adapter_bytes": adapter,
    }  # fmt: skip
