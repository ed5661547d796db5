"""Running the traced step for real: a measured peak beside the traced one.

On a CPU the peak is that of live storages, counted by the same tracker on real tensors. On CUDA it is
``torch.cuda.max_memory_allocated``, beside what the allocator reserved and what its model (`grade.memory.allocator`)
predicts, and an out-of-memory error leaves a snapshot that was recorded from the start.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from grade.config import Config
from grade.errors import InputError
from grade.memory.allocator import WORKSPACE, WORKSPACE_HOPPER, reserved_by
from grade.memory.settings import Device, StepConfig, TracedConfig
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace

_QWEN = dict(model="qwen3-4b", prompt_tokens=32, dtype="bfloat16")
_TIMED = {
    "replay": StepConfig(**_QWEN, batch_size=1, max_new_tokens=64),
    "unrolled": StepConfig(
        **_QWEN, batch_size=2, max_new_tokens=32, method="gumbel_legacy", gumbel_topk=0, reward="trunk"
    ),
}
"""Steps whose traces are timed."""


class BenchConfig(Config):
    """Settings of the measurement on a CPU."""

    models: list[str] = Field(["tiny", "smollm2-135m"], min_length=1, description="models of the measured steps")
    steps: list[int] = Field([], description="numbers of the standard steps that are measured, from 0; empty: all")
    time_traces: bool = Field(True, description="time two traces of Qwen3-4B as well")


def standard_steps(device: Device, config: BenchConfig) -> list[StepConfig]:
    """What ``grade bench memory`` runs.

    On cuda steps of Qwen3-4B; on cpu every engine, with and without checkpointing, in both types, and for the tiny
    model other options too.
    """
    steps = []
    for model in config.models if device == "cpu" else [""]:
        own = _cpu_steps(model) if device == "cpu" else _cuda_steps()
        for number in config.steps:
            if not 0 <= number < len(own):
                raise InputError("steps", number, f"0 to {len(own) - 1}")
        steps += [own[number] for number in config.steps] or own
    return steps


def _cuda_steps() -> list[StepConfig]:
    small = _QWEN | dict(batch_size=2, max_new_tokens=32)
    return [
        StepConfig(**_QWEN, batch_size=1, max_new_tokens=64),
        StepConfig(**_QWEN, batch_size=8, max_new_tokens=64),
        StepConfig(**_QWEN, batch_size=8, max_new_tokens=64, gradient_checkpointing=True),
        StepConfig(**small, method="gumbel", reward="trunk"),
        StepConfig(**small, engine="checkpointed"),
        StepConfig(**small, method="ste_legacy", gumbel_topk=0),
    ]


def _cpu_steps(model: str) -> list[StepConfig]:
    small = dict(model=model, batch_size=2, prompt_tokens=6, gumbel_topk=64)
    wide, narrow = (small | dict(dtype=dtype) for dtype in ("float32", "bfloat16"))
    # Enough tokens for the replayed pass to outweigh the copies that a float32 adapter is folded into for sampling.
    long = wide | dict(batch_size=8, max_new_tokens=12)
    other_options = [
        StepConfig(**long, method="gumbel", reward="trunk"),
        StepConfig(**long, attention="eager"),
        StepConfig(**wide, max_new_tokens=4, adapter="full", base_copies=2),
    ]
    # 16-bit products are slow on processors without instructions for them, so those completions are shorter.
    return [
        StepConfig(**long),
        StepConfig(**long, gradient_checkpointing=True),
        StepConfig(**wide, max_new_tokens=4, engine="checkpointed"),
        StepConfig(**wide, max_new_tokens=4, method="ste_legacy"),
        StepConfig(**wide, max_new_tokens=4, method="ste_legacy", gradient_checkpointing=True),
        StepConfig(**narrow, max_new_tokens=3),
        StepConfig(**narrow, max_new_tokens=3, gradient_checkpointing=True),
        StepConfig(**narrow, max_new_tokens=2, engine="checkpointed"),
        StepConfig(**narrow, max_new_tokens=2, method="gumbel_legacy"),
        StepConfig(**narrow, max_new_tokens=2, method="gumbel_legacy", gradient_checkpointing=True),
        *(other_options if model == "tiny" else []),
    ]


def require_device(device: Device) -> None:
    """Reject a device that this machine lacks, before anything is traced."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "cpu: this machine has no CUDA device")


def measure(config: TracedConfig, device: Device = "cpu", snapshot: Path | None = None) -> dict[str, Any]:
    """Run a step for real: ``measured_peak_bytes``, ``seconds``, on CUDA ``reserved_bytes``.

    On CUDA the second run counts, without the first's one-time allocations. If memory runs out, ``out_of_memory: true``
    instead of a peak, and the allocation history in the file ``snapshot``.
    """
    require_device(device)
    if device == "cpu":
        step = make_step(config, *build(config, device=device))
        start = time.perf_counter()
        tracker = run_tracked(step)
        return {"measured_peak_bytes": tracker.peak, "seconds": time.perf_counter() - start}
    if snapshot is not None:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        step = make_step(config, *build(config, device=device))
        step.run()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step.run()
        torch.cuda.synchronize()
        return {
            "measured_peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "seconds": time.perf_counter() - start,
        }
    except torch.cuda.OutOfMemoryError:
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(snapshot))
        return {"out_of_memory": True}
    finally:
        if snapshot is not None:
            torch.cuda.memory._record_memory_history(enabled=None)


def compare_with_real(
    configs: Sequence[StepConfig], device: Device = "cpu", log: Callable[[str], None] = print,
    snapshots: Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trace and measure each step: its configuration, traced and measured bytes, and their ratio.

    On CUDA also live and reserved bytes, predicted and measured; None for what there is not, as a step that ran out of
    memory has no peak. ``snapshots``: folder for such steps' allocation histories.
    """
    rows = []
    for number, config in enumerate(configs):
        traced = trace(config, device=device)
        row = {"name": config.headline, "config": config.model_dump(), "traced_peak_bytes": traced.peak}
        row |= measure(config, device, None if snapshots is None else snapshots / f"oom_{number}.pickle")
        if "measured_peak_bytes" in row:
            row["traced_over_measured"] = traced.peak / row["measured_peak_bytes"]
        if device == "cuda":
            workspace = WORKSPACE_HOPPER if torch.cuda.get_device_capability()[0] == 9 else WORKSPACE
            row |= {
                "predicted_live_bytes": traced.peak,
                "predicted_reserved_bytes": reserved_by(config, workspace=workspace).reserved,
                "measured_allocated_bytes": row.get("measured_peak_bytes"),
                "measured_reserved_bytes": row.get("reserved_bytes"),
            }
            torch.cuda.empty_cache()
        rows.append(row)
        ratio = row.get("traced_over_measured")
        log(f"{row['name']}: traced {traced.peak}, " + (f"ratio {ratio:.4f}" if ratio else "out of memory"))
        gc.collect()
    return rows


def bench_figures(rows: Sequence[Mapping[str, Any]], device: Device, time_traces: bool = True) -> dict[str, float]:
    """Headline figures: ``<device>/max_rel_error`` of traced peaks, ``<device>/steps``, ``trace/seconds_<engine>``."""
    errors = [abs(row["traced_over_measured"] - 1) for row in rows if "traced_over_measured" in row]
    figures = {f"{device}/steps": len(errors)} | ({f"{device}/max_rel_error": max(errors)} if errors else {})
    return figures | {f"trace/seconds_{name}": trace(c).seconds for name, c in _TIMED.items() if time_traces}
