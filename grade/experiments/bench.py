"""Running the traced step for real: a measured peak beside the traced one.

On a CPU the peak is that of live storages, counted by the same tracker on real tensors. On CUDA it is
``torch.cuda.max_memory_allocated``.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from pydantic import Field

from grade.config import Config
from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.settings import Device, StepConfig, TracedConfig, require_device
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace


class BenchConfig(Config):
    """Settings of the measurement on a CPU."""

    models: list[str] = Field(["tiny", "smollm2-135m"], min_length=1, description="models of the measured steps")
    steps: list[int] = Field([], description="numbers of the standard steps that are measured, from 0; empty: all")
    processes: int = Field(1, ge=1, description="processes that trace while a CUDA device is measured")


def standard_steps(device: Device, config: BenchConfig) -> list[StepConfig]:
    """What ``grade bench memory`` runs; a device that this machine lacks is an error before anything is traced."""
    require_device(device)
    steps = []
    for model in config.models:
        model_config(model, "models")
    for every in [_cuda_steps()] if device == "cuda" else map(_cpu_steps, config.models):
        for number in config.steps:
            if not 0 <= number < len(every):
                raise InputError("steps", number, f"0 to {len(every) - 1}")
        steps += [every[number] for number in config.steps] or every
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


def measure(config: TracedConfig, device: Device = "cpu") -> dict[str, Any]:
    """Measured peak and seconds of a real step; on CUDA of its second run, or ``out_of_memory: true``."""
    if device == "cpu":
        step = make_step(config, *build(config, device=device))
        start = time.perf_counter()
        tracker = run_tracked(step)
        return {"measured_peak_bytes": tracker.peak, "seconds": time.perf_counter() - start}
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


def compare_with_real(
    configs: Sequence[StepConfig], device: Device = "cpu", processes: int = 1
) -> Iterator[dict[str, Any]]:
    """Trace and measure each step, a row each."""
    if device == "cpu":
        for config in configs:
            yield _compared(config, trace(config, device=device).peak, measure(config))
        return
    with ProcessPoolExecutor(processes, get_context("forkserver")) as tracing:  # traces take longer than steps
        for config, traced in zip(configs, tracing.map(trace, configs), strict=True):
            yield _compared(config, traced.peak, measure(config, device))
            gc.collect()
            torch.cuda.empty_cache()


def _compared(config: StepConfig, traced: int, measured: dict[str, Any]) -> dict[str, Any]:
    row = {"name": config.headline, "config": config.model_dump(), "traced_peak_bytes": traced} | measured
    told = "out of memory"
    if "measured_peak_bytes" in row:
        row["traced_over_measured"] = traced / row["measured_peak_bytes"]
        told = f"ratio {row['traced_over_measured']:.4f}"
    print(f"{row['name']}: traced {traced}, {told}", flush=True)
    return row


def bench_figures(rows: Sequence[Mapping[str, Any]], device: Device) -> dict[str, float]:
    """Headline figures: ``<device>/max_rel_error`` of traced peaks, ``<device>/steps``."""
    errors = [abs(row["traced_over_measured"] - 1) for row in rows if "traced_over_measured" in row]
    return {f"{device}/steps": len(errors)} | ({f"{device}/max_rel_error": max(errors)} if errors else {})
