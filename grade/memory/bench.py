"""The same step run for real: a measured peak beside the traced one.

On a CPU the peak is that of live storages, counted by the same tracker on real tensors. On CUDA it is
``torch.cuda.max_memory_allocated``, and an out-of-memory error leaves a snapshot that was recorded from the start.
Weights are random: memory does not depend on their values.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.report import headline
from grade.memory.step import StepConfig, TracedConfig
from grade.memory.trace import run_tracked, trace

QWEN = dict(model="qwen3-4b", prompt_tokens=32, dtype="bfloat16")
SMOL = dict(model="smollm2-135m", batch_size=2, prompt_tokens=6, gumbel_topk=64)
STANDARD: dict[str, list[StepConfig]] = {
    "cuda": [
        StepConfig(**QWEN, batch_size=1, max_new_tokens=64),
        StepConfig(**QWEN, batch_size=8, max_new_tokens=64),
        StepConfig(**QWEN, batch_size=8, max_new_tokens=64, gradient_checkpointing=True),
        StepConfig(**QWEN, batch_size=2, max_new_tokens=32, method="gumbel", reward="trunk"),
        StepConfig(**QWEN, batch_size=2, max_new_tokens=32, engine="checkpointed"),
        StepConfig(**QWEN, batch_size=2, max_new_tokens=32, method="ste_legacy", gumbel_topk=0),
    ],
    "cpu": [
        StepConfig(**SMOL, max_new_tokens=6, dtype="float32"),
        StepConfig(**SMOL, max_new_tokens=6, dtype="float32", gradient_checkpointing=True),
        StepConfig(**SMOL, max_new_tokens=6, dtype="float32", method="gumbel", reward="trunk"),
        StepConfig(**SMOL, max_new_tokens=6, dtype="float32", attention="eager"),
        StepConfig(**SMOL, max_new_tokens=4, dtype="float32", engine="checkpointed"),
        StepConfig(**SMOL, max_new_tokens=4, dtype="float32", method="ste_legacy"),
        StepConfig(**SMOL, max_new_tokens=4, dtype="float32", adapter="full", base_copies=2),
        StepConfig(**SMOL, max_new_tokens=3, dtype="bfloat16"),
        StepConfig(**SMOL, max_new_tokens=3, dtype="bfloat16", gradient_checkpointing=True),
        StepConfig(**SMOL, max_new_tokens=2, dtype="bfloat16", engine="checkpointed"),
        StepConfig(**SMOL, max_new_tokens=2, dtype="bfloat16", method="gumbel_legacy"),
    ],
}  # fmt: skip
"""What ``python -m grade bench memory`` runs."""


def measure(config: TracedConfig, device: str = "cpu", snapshot: str | Path | None = None) -> dict[str, Any]:
    """Run a step for real and report its peak: on CUDA that of a second one, as the first makes what is made once.

    Args:
        config: The step.
        device: cpu or cuda.
        snapshot: File for CUDA's allocation history if memory runs out.

    Returns:
        ``measured_peak_bytes``, ``seconds`` of the step, on CUDA ``reserved_bytes``; if memory ran out,
        ``out_of_memory: true`` instead of a peak.

    Raises:
        InputError: If there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "cpu: this machine has no CUDA device")
    if device == "cuda":
        return _measure_cuda(config, snapshot)
    step = config.make_step(*config.build(model_config(config.model), device))
    start = time.perf_counter()
    tracker = run_tracked(step)
    return {"measured_peak_bytes": tracker.peak, "seconds": time.perf_counter() - start}


def _measure_cuda(config: TracedConfig, snapshot: str | Path | None) -> dict[str, Any]:
    if snapshot is not None:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        step = config.make_step(*config.build(model_config(config.model), "cuda"))
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


def compare(
    configs: Sequence[StepConfig], device: str = "cpu", log: Callable[[str], None] = print,
    snapshots: str | Path | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trace and measure each configuration.

    Args:
        configs: The steps.
        device: Where to measure.
        log: Receives a line each.
        snapshots: Folder for CUDA snapshots of steps that run out of memory.

    Returns:
        One row each: the configuration, traced and measured bytes, their ratio.
    """
    rows = []
    for number, config in enumerate(configs):
        traced = trace(config, device=device, all_layers=device == "cpu")
        row = {"name": headline(config), "config": config.model_dump(), "traced_peak_bytes": traced.peak}
        row |= measure(config, device, None if snapshots is None else Path(snapshots) / f"oom_{number}.pickle")
        if "measured_peak_bytes" in row:
            row["traced_over_measured"] = traced.peak / row["measured_peak_bytes"]
        rows.append(row)
        ratio = row.get("traced_over_measured")
        log(f"{row['name']}: traced {traced.peak}, " + (f"ratio {ratio:.4f}" if ratio else "out of memory"))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows
