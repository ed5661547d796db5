"""How good a trace is: training steps that run for real, and their measured peaks beside the traced ones.

On a CPU the peak is that of live storages, counted by the same tracker on real tensors. On CUDA it is
``torch.cuda.max_memory_allocated``.
"""

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from grade.memory.settings import Device, StepConfig, TracedConfig, require_device
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace


def standard_steps(device: Device, models: Sequence[str] = ("tiny",)) -> list[StepConfig]:
    """Steps of every engine and of both types: on CUDA of Qwen3-4B and SmolLM2, on a CPU small ones of ``models``."""
    steps = _cuda_steps() if device == "cuda" else [step for model in models for step in _cpu_steps(model)]
    return [StepConfig(**values) for values in steps]


def _cuda_steps() -> list[dict[str, Any]]:
    qwen = dict(model="qwen3-4b", prompt_tokens=32, dtype="bfloat16")
    one, two = qwen | dict(batch_size=1, max_new_tokens=64), qwen | dict(batch_size=2, max_new_tokens=32)
    eight, long = one | dict(batch_size=8), one | dict(batch_size=8, prompt_tokens=256, max_new_tokens=256)
    legacy, again = two | dict(gumbel_topk=0), dict(gradient_checkpointing=True)
    small = dict(model="smollm2-135m", prompt_tokens=32, max_new_tokens=64, batch_size=16)
    return [
        one,
        eight,
        eight | again,
        two,
        two | dict(method="gumbel", reward="trunk"),
        two | dict(engine="checkpointed"),
        legacy | dict(method="ste_legacy"),
        legacy | dict(method="gumbel_legacy", reward="trunk", base_copies=2),
        *(eight | dict(method=method) for method in ("grpo", "ppo", "remax")),
        long | dict(method="rloo"),
        long | dict(method="grpo") | again,
        small | dict(dtype="float32"),
        small | dict(dtype="float32", autocast=True, method="rloo"),
        small | dict(adapter="full"),
        small | dict(attention="eager"),
    ]


def _cpu_steps(model: str) -> list[dict[str, Any]]:
    small, again = dict(model=model, batch_size=2, prompt_tokens=6, gumbel_topk=64), dict(gradient_checkpointing=True)
    wide, narrow = (small | dict(dtype=dtype) for dtype in ("float32", "bfloat16"))
    # Enough tokens for the replayed pass to outweigh the copies that a float32 adapter is folded into for sampling.
    long = wide | dict(batch_size=8, max_new_tokens=12)
    # 16-bit products are slow on processors without instructions for them, so those completions are shorter.
    few, two, three = wide | dict(max_new_tokens=4), narrow | dict(max_new_tokens=2), narrow | dict(max_new_tokens=3)
    steps = []
    for lean, other, legacy in ((long, few, "ste_legacy"), (three, two, "gumbel_legacy")):
        unrolled = other | dict(method=legacy)
        steps += [lean, lean | again, other | dict(engine="checkpointed"), unrolled, unrolled | again]
    if model == "tiny":
        steps += [
            long | dict(method="gumbel", reward="trunk"),
            long | dict(attention="eager"),
            few | dict(adapter="full", base_copies=2),
        ]
    return steps


def compare(steps: Iterable[StepConfig], device: Device = "cpu") -> Iterator[dict[str, Any]]:
    """Trace each step and run it; a row each, and `InputError` for a device that this machine lacks.

    A row has the step's ``name`` and ``config``; ``traced_peak_bytes``, of which ``fixed_bytes`` (weights, adapter and
    optimizer state) are there before the step and after it; and what `measure` finds.
    """
    require_device(device)
    for step in steps:
        traced = trace(step, device=device)
        row = {"traced_peak_bytes": traced.peak, "fixed_bytes": traced.fixed_bytes} | measure(step, device)
        yield {"name": step.headline, "config": step.model_dump()} | row


def measure(config: TracedConfig, device: Device = "cpu") -> dict[str, Any]:
    """``measured_peak_bytes`` and ``seconds`` of a step; on CUDA of its second run, or ``out_of_memory: true``."""
    if device == "cpu":
        step = make_step(config, *build(config, device=device))
        start = time.perf_counter()
        tracker = run_tracked(step)
        return {"measured_peak_bytes": tracker.peak, "seconds": time.perf_counter() - start}
    gc.collect()  # what an earlier step left goes from the card with the cache below
    try:
        step = make_step(config, *build(config, device=device))
        torch.cuda.empty_cache()  # what building left is not the step's
        step.run()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step.run()
        torch.cuda.synchronize()
    except torch.cuda.OutOfMemoryError:
        return {"out_of_memory": True}
    return {
        "measured_peak_bytes": torch.cuda.max_memory_allocated(),
        "seconds": time.perf_counter() - start,
    }
