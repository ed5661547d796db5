"""Predict the peak memory of a training step without a GPU, weights or data.

The trainers' own step runs on meta tensors, which have shapes and types but no contents, under a `LiveTracker`. The
prediction therefore follows the code: how many bytes are alive at the peak, what they are for, in which phase, and
which modules made the largest tensors.

Storages are rounded up to 512 bytes, as by CUDA's caching allocator. Left out: the allocator's fragmentation, the CUDA
context, cuBLAS and cuDNN workspaces.

Layers are alike, so live bytes at the same point of the step are linear in the number of layers. A deep model is
traced with `BASE_LAYERS` layers and each allocation site's peak is extrapolated; the largest is the peak. Tests compare
this with full traces.
"""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from transformers import PretrainedConfig

from grade.errors import InputError
from grade.memory.kernels import Device, kernels_of
from grade.memory.live import CATEGORIES, SHARDED, Category, LiveTracker
from grade.memory.models import model_config, to_fake, with_layers
from grade.memory.nodata import NoData
from grade.memory.sharded import Sharding, alone_among, divide, gathers_seen
from grade.memory.step import Step, TracedConfig

_FAKE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)

FIXED: tuple[Category, ...] = ("weights", "adapter", "optimizer")
"""What is there before the step and after it."""

BASE_LAYERS = (2, 3)
"""Numbers of layers traced: the first and the last differ in what they keep, one more in the middle is the slope."""


@dataclass(frozen=True)
class LargeTensor:
    """One of the largest tensors at the peak.

    Attributes:
        nbytes: Size.
        shape: Shape.
        dtype: Type.
        category: What it is for.
        op: Operator that made it.
        module: Module that made it; empty in backward and in losses.
        phase: Phase that made it.
    """

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    category: Category
    op: str
    module: str
    phase: str


@dataclass(frozen=True)
class Trace:
    """The memory of one optimizer step.

    Attributes:
        peak: Highest live bytes.
        categories: Bytes at the peak by category; they sum to ``peak``.
        phases: For each phase, in order, bytes by category at its own peak.
        peak_phase: Phase of the peak.
        largest: The ten largest tensors at the peak that the step made (of the traced layers).
        timeline: Live bytes after each allocation, and the phase (of the traced layers).
        layers: Layers of the model.
        traced_layers: Layers that were traced; fewer than ``layers`` if extrapolated.
        flops: Floating point operations of the step's products and attention.
        seconds: Wall time of the trace.
        received: Bytes that reach this process from others in the step.
    """

    peak: int
    categories: dict[Category, int]
    phases: dict[str, dict[Category, int]]
    peak_phase: str
    largest: list[LargeTensor]
    timeline: list[tuple[str, int]]
    layers: int
    traced_layers: int
    flops: int
    seconds: float
    received: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes at the peak without weights, adapter and optimizer: what the step itself needs."""
        return self.peak - sum(self.categories[c] for c in FIXED)


def trace(
    config: TracedConfig, *, device: Device = "cuda", all_layers: bool = False, processes: int = 1,
    sharding: Sharding = "fsdp2",
) -> Trace:  # fmt: skip
    """Trace one optimizer step.

    Args:
        config: The step.
        device: Where it would run; on a CPU, float32 sampling uses another product for few rows.
        all_layers: Trace every layer, without extrapolation.
        processes: Processes that train together, each with the batch of ``config``; the first one is traced.
        sharding: How they share the base.

    Returns:
        The trace.

    Raises:
        InputError: For an unknown model, sizes that do not fit it, or code that reads the contents of a tensor (the
            message names the line).
    """
    start, model = time.perf_counter(), model_config(config.model)
    layers, vocab = model.num_hidden_layers, model.vocab_size
    if all_layers or layers <= max(BASE_LAYERS) + 1:
        tracker = trace_layers(config, model, device, processes, sharding)
        return _assemble([tracker], [layers], layers, vocab, time.perf_counter() - start)
    trackers = [trace_layers(config, with_layers(model, n), device, processes, sharding) for n in BASE_LAYERS]
    return _assemble(trackers, list(BASE_LAYERS), layers, vocab, time.perf_counter() - start)


def trace_all(configs: Mapping[str, TracedConfig], processes: int = 1) -> dict[str, Trace]:
    """Trace many steps, in parallel if asked: one trace runs on one core.

    Args:
        configs: Steps by name.
        processes: Number of parallel processes. Starting them takes seconds, which pays off for models of billions of
            parameters.

    Returns:
        Traces by name, in the order given.

    Raises:
        InputError: As `trace`.
    """
    if processes == 1:
        return {name: trace(config) for name, config in configs.items()}
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, however many processes and calls there are
    # Exempt imported modules from garbage collection: searching them for cycles is a tenth of a trace's time.
    with ProcessPoolExecutor(processes, context, gc.freeze) as pool:
        return dict(zip(configs, pool.map(trace, configs.values()), strict=True))


def run_tracked(step: Step, round_to: int = 512, device: str | None = None) -> LiveTracker:
    """Run a step on whatever tensors it has, fake or real, under a `LiveTracker`.

    Args:
        step: The step.
        round_to: As in `MemoryTracker`.
        device: As in `LiveTracker`.

    Returns:
        The tracker, which also counts what existed before the step.
    """
    tracker = LiveTracker(round_to, device)
    for category, tensors in step.existing().items():
        tracker.track_existing(tensors)
        tracker.tag(tensors, category)
    with gathers_seen(tracker), tracker, tracker.naming(step.backbone):
        step.run(tracker)
    return tracker


def trace_layers(
    config: TracedConfig, model: PretrainedConfig, device: Device, processes: int = 1, sharding: Sharding = "fsdp2"
) -> LiveTracker:
    """Trace all layers of ``model``, and return the tracker with every tensor in it; see `trace`."""
    if processes > 1 and config.adapter == "full" and sharding == "fsdp2":
        raise InputError("adapter", "full", "lora: only a frozen base is divided among processes")
    backbone, others = config.build(model)
    mode, counted = contextlib.nullcontext(), "meta" if device == "cuda" else None  # CPU tensors take no GPU memory
    if config.autocast:  # autocast depends on the device, and meta has none; fake CPU tensors do, at twice the time
        counted = None
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        to_fake(backbone, mode, *others)
    with _untraceable_lines_named(), mode, NoData(), kernels_of(device), alone_among(processes):
        if processes > 1 and sharding == "fsdp2":
            divide(backbone)
        return run_tracked(config.make_step(backbone, others), device=counted)


@contextlib.contextmanager
def _untraceable_lines_named() -> Iterator[None]:
    try:
        yield
    except (*_FAKE_ERRORS, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        if not isinstance(error, _FAKE_ERRORS) and "meta" not in str(error).lower():
            raise
        own = [f for f in traceback.extract_tb(error.__traceback__) if "torch" not in Path(f.filename).parts]
        last = own[-1]
        where = f"{Path(last.filename).name}:{last.lineno} ({last.line})"
        allowed = "code that reads shapes only: memory may not depend on the contents of a tensor"
        raise InputError("traced step", where, allowed) from error


def _assemble(trackers: list[LiveTracker], traced: list[int], layers: int, vocab: int, seconds: float) -> Trace:
    """Peaks by phase, extrapolated in layers from the last two traces if there are two."""

    def at(*values: int) -> int:
        if len(values) == 1:
            return values[0]
        slope = (values[1] - values[0]) / (traced[1] - traced[0])
        return round(values[1] + slope * (layers - traced[1]))

    last, highest = trackers[-1], dict[str, tuple[int, tuple]]()
    for key in trackers[-1].sites:
        if all(key in t.sites for t in trackers):
            peak = at(*(t.sites[key].peak for t in trackers))
            if peak > highest.get(key[0], (-1,))[0]:
                highest[key[0]] = (peak, key)
    phases = {}
    categories = (*CATEGORIES, *(SHARDED if any(record.tag in SHARDED for record in last.records) else ()))
    for name, (_, key) in highest.items():
        parts = [_composition(t, t.sites[key].at, vocab) for t in trackers]
        phases[name] = {c: at(*(p[c] for p in parts)) for c in categories}
    peak_phase = max(highest, key=lambda name: highest[name][0])
    index = last.sites[highest[peak_phase][1]].at
    made = [r for r in last.alive_at(index) if last.category(r, vocab) not in FIXED]
    made = sorted(made, key=lambda r: -r.nbytes)[:10]
    largest = [
        LargeTensor(r.nbytes, r.shape, str(r.dtype).removeprefix("torch."), last.category(r, vocab), r.op, r.module,
                    r.phase)
        for r in made
    ]  # fmt: skip
    before = sum(record.op == "existing" for record in last.records)
    timeline = list(zip(last.phase_of, last.live, strict=True))[before:]
    peak = highest[peak_phase][0]
    flops = at(*(t.flops for t in trackers))
    return Trace(
        peak, phases[peak_phase], phases, peak_phase, largest, timeline, layers, traced[-1], flops, seconds,
        at(*(t.received for t in trackers)),
    )  # fmt: skip


def _composition(tracker: LiveTracker, index: int, vocab: int) -> Counter:
    parts: Counter = Counter()
    for record in tracker.alive_at(index):
        parts[tracker.category(record, vocab)] += record.nbytes
    return parts
