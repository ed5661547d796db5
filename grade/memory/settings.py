"""Which settings fit a budget, and which of them is the cheapest: GPUs, sharding, checkpointing, batch, length.

A few traces of each way to run a step give its peaks by phase as polynomials: of the first degree in the batch, between
the configured one and one that about fits, and of the second in the length (a mask is quadratic in it). Of a base that
N GPUs divide, each holds an Nth more than on very many. The largest batch and length that fit are read off these, and
the cheapest setting is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.plan import LARGEST, changed
from grade.memory.step import TracedConfig
from grade.memory.trace import Trace

Way = Literal["none", "ddp", "fsdp2"]
WAYS: tuple[Way, ...] = ("ddp", "fsdp2")
"""How several GPUs share a step: each with the whole base, or with an Nth of it."""
COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs that are considered: those of one machine."""

ARITHMETIC = 0.4 * 989e12
"""Operations a second: 40 % of an H100's dense bfloat16 peak (NVIDIA's data sheet, SXM)."""
BANDWIDTH = 3.35e12
"""Bytes a second between an H100 and its memory (the same)."""
LINK = 450e9
"""Bytes a second that an H100 receives over NVLink: half of 900 GB/s in both directions (the same)."""

GroupTracer = Callable[[TracedConfig, int, Way], Trace]
"""Traces a step on one of several GPUs that share it in some way."""
Points = Sequence[tuple[int, Mapping[str, int]]]
"""Values of a quantity, and bytes of each phase with it."""


@dataclass(frozen=True)
class Setting:
    """One way to run a step, with the largest batch and length that fit.

    Attributes:
        gpus: GPUs, each with its own batch.
        sharding: none, ddp or fsdp2.
        gradient_checkpointing: Whether layers are recomputed in backward.
        batch_size: Largest batch on one GPU, with the length as configured; None if not even the smallest fits.
        peak: Peak bytes on one GPU with it, or with the smallest.
        max_new_tokens: Largest completion length with the batch as configured; None if not even one token fits.
        flops: Operations for one completion.
        received: Bytes that one GPU receives from others in a step.
        gpu_seconds: Estimated GPU time for one completion, see `gpu_seconds`; None if nothing fits.
        traced: Whether ``peak`` is a trace's, not read off other traces.
    """

    gpus: int
    sharding: Way
    gradient_checkpointing: bool
    batch_size: int | None
    peak: int
    max_new_tokens: int | None
    flops: int
    received: int
    gpu_seconds: float | None
    traced: bool = False


def settings(
    config: TracedConfig, room: int, tracer: GroupTracer, counts: Sequence[int] = COUNTS, most: int = LARGEST
) -> list[Setting]:
    """All ways to run a step, the cheapest one that fits first.

    Args:
        config: The step; its batch and length are those that the other is varied with.
        room: Bytes of one GPU.
        tracer: Traces a step on one of several GPUs.
        counts: Numbers of GPUs.
        most: Largest batch and length to consider.

    Returns:
        One setting for each number of GPUs, sharding and choice of checkpointing, by ``gpu_seconds``; then those that
        do not fit. The first one is traced.

    Raises:
        InputError: As the tracer does.
    """
    rows = []
    for again in (False, True):
        try:
            step = changed(config, gradient_checkpointing=again)
        except InputError:  # an engine that cannot
            continue
        rows += _Way(step, tracer, room, most).settings(counts)
    rows.sort(key=lambda row: (row.gpu_seconds is None, row.gpu_seconds or 0, row.gpus))
    return rows if rows[0].batch_size is None else [_traced(rows[0], config, room, tracer), *rows[1:]]


def gpu_seconds(flops: int, weights: int, tokens: int, received: int, batch: int) -> float:
    """Estimated GPU time for one completion: a way to order settings, not a prediction of a step's time.

    ``flops / ARITHMETIC + (tokens * weights / BANDWIDTH + received / LINK) / batch``: products, reading all weights
    for every sampled token, which serves the whole batch, and waiting for other GPUs.

    Args:
        flops: Operations for one completion.
        weights: Bytes read for each token.
        tokens: Tokens that are sampled one by one.
        received: Bytes from other GPUs in a step.
        batch: Completions of a step on one GPU.

    Returns:
        Seconds.
    """
    return flops / ARITHMETIC + (tokens * weights / BANDWIDTH + received / LINK) / batch


def about(step: TracedConfig, trace: Trace, room: int, most: int = LARGEST) -> int:
    """The batch that fits if what the step itself needs is in proportion to it: a first guess.

    Args:
        step: The step.
        trace: Its trace.
        room: Bytes.
        most: Largest batch to consider.

    Returns:
        A multiple of ``step.batch_unit``, at least one.
    """
    unit, fixed = step.batch_unit, trace.peak - trace.step_bytes
    batch = int(step.batch_size * (room - fixed) / max(trace.step_bytes, 1))
    return max(min(batch, most) // unit * unit, unit)


class _Way:
    """A step with or without checkpointing: its traces, and what they say about other sizes and more GPUs."""

    def __init__(self, step: TracedConfig, tracer: GroupTracer, room: int, most: int) -> None:
        self.step, self.tracer, self.room, self.most = step, tracer, room, most
        self.base = tracer(step, 1, "none")
        batch, length = step.batch_size, step.max_new_tokens
        self.context = step.longest(model_config(step.model)) or most + step.prompt_tokens
        self.context -= step.prompt_tokens
        far = about(step, self.base, room, most)
        far = far if far != batch else batch + step.batch_unit
        lengths = [n for n in (length // 2, 2 * length) if 0 < n <= self.context]
        at = (batch, self.base.phases)
        self.batches = self._points("batch_size", [far], at)
        self.lengths = self._points("max_new_tokens", lengths, (length, self.base.phases))

    def _points(self, name: str, values: Sequence[int], known: tuple[int, Mapping]) -> Points:
        traces = [(value, self.tracer(changed(self.step, **{name: value}), 1, "none")) for value in values]
        return [(known[0], _totals(known[1])), *((value, _totals(trace.phases)) for value, trace in traces)]

    def settings(self, counts: Sequence[int]) -> list[Setting]:
        """One setting for each number of GPUs and sharding."""
        rows = [self._setting(1, "none", dict.fromkeys(self.base.phases, 0.0), 0)] if 1 in counts else []
        several = [n for n in counts if n > 1]
        for way in WAYS if several else ():
            if way == "fsdp2" and self.step.adapter == "full":
                continue  # only a frozen base is divided
            few = min(several)
            try:
                shared = self.tracer(self.step, few, way)
            except InputError:  # a step that cannot be shared in this way
                continue
            for n in several:
                more = _difference(shared, self.base, few, n)
                share = (n - 1) / n * few / (few - 1)  # everything arrives but the part that is here
                rows.append(self._setting(n, way, more, round(shared.received * share)))
        return rows

    def _setting(self, gpus: int, way: Way, more: Mapping[str, float], received: int) -> Setting:
        unit = self.step.batch_unit
        batch = self._largest(self.batches, more, unit, self.most)
        length = self._largest(self.lengths, more, 1, min(self.most, self.context))
        peak = max(_at(self.batches, more, batch or unit).values())
        flops, fixed = self.base.flops // self.step.batch_size, self.base.categories
        tokens = self.step.max_new_tokens if "rollout" in self.base.phases else 0
        cost = gpu_seconds(flops, fixed["weights"] + fixed["adapter"], tokens, received, batch) if batch else None
        again = self.step.gradient_checkpointing
        return Setting(gpus, way, again, batch, round(peak), length, flops, received, cost)

    def _largest(self, points: Points, more: Mapping[str, float], unit: int, most: int) -> int | None:
        """Largest multiple of ``unit`` whose phases all fit; they grow with it."""
        good, bad = 0, most // unit + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if max(_at(points, more, middle * unit).values()) <= self.room:
                good = middle
            else:
                bad = middle
        return good * unit or None


def _totals(phases: Mapping[str, Mapping]) -> dict[str, int]:
    return {name: sum(parts.values()) for name, parts in phases.items()}


def _difference(shared: Trace, base: Trace, traced: int, gpus: int) -> dict[str, float]:
    """What each phase needs more than on one GPU, with another number of them than the one traced.

    Weights on N GPUs are ``a + b / N``; on one they are ``a + b``.
    """
    more = {}
    for name, there in base.phases.items():
        here = shared.phases.get(name, there)
        divided = (there["weights"] - here["weights"]) / (1 - 1 / traced)
        more[name] = sum(here.values()) - sum(there.values()) - divided * (1 / traced - 1 / gpus)
    return more


def _at(points: Points, more: Mapping[str, float], value: int) -> dict[str, float]:
    """Bytes of each phase at a value: the polynomial through the points (Lagrange), and what comes on top."""
    found = dict(more)
    for place, (x, phases) in enumerate(points):
        weight = 1.0
        for other, (y, _) in enumerate(points):
            weight *= (value - y) / (x - y) if other != place else 1.0
        for name in found:
            found[name] += weight * phases.get(name, 0)
    return found


def _traced(row: Setting, config: TracedConfig, room: int, tracer: GroupTracer) -> Setting:
    """A setting with a trace's peak; its batch is smaller where the trace says that it has to be."""
    batch, unit = row.batch_size, config.batch_unit
    while True:
        step = changed(config, gradient_checkpointing=row.gradient_checkpointing, batch_size=batch)
        trace = tracer(step, row.gpus, row.sharding)
        if trace.peak <= room or batch == unit:
            break
        batch = max(unit, min(batch - unit, about(step, trace, room)))
    flops = trace.flops // batch
    tokens = config.max_new_tokens if "rollout" in trace.phases else 0
    fixed = tracer(changed(step, batch_size=config.batch_size), 1, "none").categories
    cost = gpu_seconds(flops, fixed["weights"] + fixed["adapter"], tokens, trace.received, batch)
    fits = trace.peak <= room
    return replace(
        row, batch_size=batch if fits else None, peak=trace.peak, flops=flops, received=trace.received,
        gpu_seconds=cost if fits else None, traced=True,
    )  # fmt: skip
