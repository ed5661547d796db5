"""Running the traced step for real: a measured peak beside the traced one.

On a CPU the peak is that of live storages, counted by the same tracker on real tensors. On CUDA it is
``torch.cuda.max_memory_allocated``, beside it stands what the allocator reserved and what its model
(`grade.memory.allocator`) predicts, and an out-of-memory error leaves a snapshot that was recorded from the start.
Weights are random: memory does not depend on their values.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field

from grade.config import Config
from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.step import StepConfig, TracedConfig
from grade.memory.trace import run_tracked, trace

if TYPE_CHECKING:
    from grade.memory.allocator import Replay

QWEN = dict(model="qwen3-4b", prompt_tokens=32, dtype="bfloat16")
_SMALL = dict(batch_size=2, prompt_tokens=6, gumbel_topk=64)


def standard_steps(device: str, model: str = "tiny") -> list[StepConfig]:
    """What ``python -m grade bench memory`` runs.

    Args:
        device: On cuda steps of Qwen3-4B; on cpu every engine, with and without checkpointing, in both types, and for
            the tiny model other options too.
        model: On cpu, the model.

    Returns:
        The steps.
    """
    if device == "cuda":
        small = QWEN | dict(batch_size=2, max_new_tokens=32)
        return [
            StepConfig(**QWEN, batch_size=1, max_new_tokens=64),
            StepConfig(**QWEN, batch_size=8, max_new_tokens=64),
            StepConfig(**QWEN, batch_size=8, max_new_tokens=64, gradient_checkpointing=True),
            StepConfig(**small, method="gumbel", reward="trunk"),
            StepConfig(**small, engine="checkpointed"),
            StepConfig(**small, method="ste_legacy", gumbel_topk=0),
        ]
    wide, narrow = (dict(model=model, dtype=dtype, **_SMALL) for dtype in ("float32", "bfloat16"))
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


def chosen(steps: Sequence[StepConfig], numbers: Sequence[int]) -> list[StepConfig]:
    """The steps with these numbers, from 0; all if there are none.

    Raises:
        InputError: For a number without a step.
    """
    for number in numbers:
        if not 0 <= number < len(steps):
            raise InputError("steps", number, f"0 to {len(steps) - 1}")
    return [steps[number] for number in numbers] or list(steps)


class BenchConfig(Config):
    """Settings of the measurement on a CPU."""

    models: list[str] = Field(["tiny", "smollm2-135m"], min_length=1, description="models of the measured steps")
    steps: list[int] = Field([], description="numbers of the standard steps that are measured, from 0; empty: all")
    time_traces: bool = Field(True, description="time two traces of Qwen3-4B as well")


TRACED = {
    "replay": StepConfig(**QWEN, batch_size=1, max_new_tokens=64),
    "unrolled": StepConfig(
        **QWEN, batch_size=2, max_new_tokens=32, method="gumbel_legacy", gumbel_topk=0, reward="trunk"
    ),
}
"""Steps whose traces are timed."""


def require_device(device: str) -> None:
    """Reject a device that this machine lacks, before anything is traced.

    Raises:
        InputError: If there is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "cpu: this machine has no CUDA device")


def measure(config: TracedConfig, device: str = "cpu", snapshot: str | Path | None = None) -> dict[str, Any]:
    """Run a step for real and report its peak; on CUDA the second run's, without the first's one-time allocations.

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
    require_device(device)
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
        log: Receives one line per step.
        snapshots: Folder for CUDA snapshots of steps that run out of memory.

    Returns:
        One row per step: its configuration, traced and measured bytes, and their ratio. On CUDA also what
        `four_numbers` returns.
    """
    from grade.memory.allocator import reserved  # here: it would lengthen the chain of imports

    rows = []
    for number, config in enumerate(configs):
        traced = trace(config, device=device)
        row = {"name": config.headline, "config": config.model_dump(), "traced_peak_bytes": traced.peak}
        row |= measure(config, device, None if snapshots is None else Path(snapshots) / f"oom_{number}.pickle")
        if "measured_peak_bytes" in row:
            row["traced_over_measured"] = traced.peak / row["measured_peak_bytes"]
        if device == "cuda":
            row |= four_numbers(row, reserved(config, workspace=workspace_bytes()))
        rows.append(row)
        ratio = row.get("traced_over_measured")
        log(f"{row['name']}: traced {traced.peak}, " + (f"ratio {ratio:.4f}" if ratio else "out of memory"))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def four_numbers(row: Mapping[str, Any], predicted: Replay | None) -> dict[str, int | None]:
    """Live and reserved bytes of a step on CUDA, predicted and measured.

    Args:
        row: What was traced and measured: ``traced_peak_bytes``, and if the step ran, ``measured_peak_bytes`` and
            ``reserved_bytes``.
        predicted: The allocator's model of the step.

    Returns:
        ``predicted_live_bytes``, ``predicted_reserved_bytes``, ``measured_allocated_bytes`` and
        ``measured_reserved_bytes``; None for what there is not: on a CPU there is no allocator with segments, and a
        step that ran out of memory has no peak.
    """
    return {
        "predicted_live_bytes": row["traced_peak_bytes"],
        "predicted_reserved_bytes": None if predicted is None else predicted.reserved,
        "measured_allocated_bytes": None if predicted is None else row.get("measured_peak_bytes"),
        "measured_reserved_bytes": row.get("reserved_bytes"),
    }


def workspace_bytes() -> int:
    """The workspace that cuBLAS takes on this machine's GPU."""
    from grade.memory.allocator import WORKSPACE, WORKSPACE_HOPPER  # here: see `compare`

    return WORKSPACE_HOPPER if torch.cuda.get_device_capability()[0] == 9 else WORKSPACE


def bench_figures(rows: Sequence[Mapping[str, Any]], device: str, time_traces: bool = True) -> dict[str, float]:
    """Headline figures of a comparison.

    Args:
        rows: From `compare`.
        device: Where it was measured.
        time_traces: Trace two steps of Qwen3-4B for their wall time.

    Returns:
        ``<device>/max_rel_error`` of traced against measured peaks, ``<device>/steps`` compared, and wall times of two
        traces of Qwen3-4B, ``trace/seconds_<engine>``.
    """
    errors = [abs(row["traced_over_measured"] - 1) for row in rows if "traced_over_measured" in row]
    figures = {f"{device}/steps": len(errors)} | ({f"{device}/max_rel_error": max(errors)} if errors else {})
    return figures | {f"trace/seconds_{name}": trace(c).seconds for name, c in TRACED.items() if time_traces}
