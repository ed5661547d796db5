"""What fits a budget, which way to run a step is the cheapest, and which single change saves most.

There is one search. A few traces of a way to run a step give its peaks by phase as polynomials (`_Peaks`): of the first
degree in the batch, between the configured one and one that about fits, and of the second in the length (a mask is
quadratic in it). Of a base that N GPUs divide, each holds an Nth more than on very many. The largest value that fits is
read off; where it must be exact it is then traced, the trace becomes another point, and the value is read off again.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from grade.errors import InputError
from grade.gradients.methods import METHODS, RELAXED, reads
from grade.memory.settings import StepConfig, TracedConfig
from grade.memory.step import context_of
from grade.memory.trace import Trace, trace

Quantity = Literal["batch_size", "max_new_tokens", "hops"]
Way = Literal["none", "ddp", "fsdp2"]
"""How several GPUs share a step: each with the whole base, or with an Nth of it."""
Tracer = Callable[[TracedConfig], Trace]
GPUS = (1, 2, 4, 8)
"""Numbers of GPUs that are considered: those of one machine."""

ARITHMETIC = 0.4 * 989e12
"""Operations per second: 40 % of an H100's dense bfloat16 peak (NVIDIA's data sheet, SXM)."""
BANDWIDTH = 3.35e12
"""Bytes per second between an H100 and its memory (the same)."""
LINK = 450e9
"""Bytes per second that an H100 receives over NVLink: half of 900 GB/s in both directions (the same)."""

_LONG, _NEAR = 512, 0.005  # a trace of so many tokens takes so long that a length within 0.5 % of the room will do
_LARGEST = 4096  # where the search for a batch or a length ends
_SIZE = TypeAdapter(Annotated[ByteSize, Field(gt=0)])
_SIZE_TEXT = re.compile(r"[\d.]+\s*\w*")  # pydantic ignores what follows: 24,5GiB would be 24 bytes


def parse_bytes(text: str, field: str = "fits") -> int:
    """Bytes from ``24GiB``, ``80 GB``, ``500MiB`` or a plain number of bytes.

    Args:
        text: Number and unit; GiB is 2^30, GB is 10^9.
        field: Named in an error.

    Returns:
        Bytes.

    Raises:
        InputError: If it cannot be read or is not positive.

    >>> parse_bytes("24GiB"), parse_bytes("1.5 kB")
    (25769803776, 1500)
    """
    try:
        return int(_SIZE.validate_python(text if _SIZE_TEXT.fullmatch(text.strip()) else ""))
    except ValidationError:
        allowed = "a positive number with B, kB, MB, GB, KiB, MiB or GiB, for example 24GiB"
        raise InputError(field, text, allowed) from None


@dataclass(frozen=True)
class Fit:
    """The largest value of one quantity that fits (None if not even the smallest does), and the peak bytes with it."""

    quantity: Quantity
    value: int | None
    peak: int


@dataclass(frozen=True)
class Change:
    """One change of a configuration, in words, and the peak bytes that it would need and save."""

    name: str
    peak: int
    saved: int


@dataclass(frozen=True)
class WayToRun:
    """One way to run a step, with the largest batch and length that fit."""

    gpus: int  # each with its own batch
    sharding: Way
    gradient_checkpointing: bool
    batch_size: int | None  # largest on one GPU, with the length as configured; None: not even the smallest fits
    peak: int  # bytes on one GPU with it, or with the smallest
    max_new_tokens: int | None  # largest, with the batch as configured; None: not even one token fits
    flops: int  # for one completion
    received: int  # bytes from other GPUs in a step
    gpu_seconds: float | None  # estimated for one completion
    traced: bool = False  # whether ``peak`` is a trace's, not read off other traces


def remembering(tracer: Callable[..., Trace]) -> Callable[..., Trace]:
    """A tracer that traces no step twice: a plan, ways to run and single changes share some."""
    known: dict[tuple, Trace] = {}

    def remembered(config: TracedConfig, *more: Any) -> Trace:
        key = (type(config).__name__, config.model_dump_json(), *more)
        if key not in known:
            known[key] = tracer(config, *more)
        return known[key]

    return remembered


class _Peaks:
    """Bytes of each phase of a step with one quantity varied: traced at some values, polynomials between them.

    ``most``: largest batch; a length ends at the models' context.
    """

    def __init__(self, step: TracedConfig, name: Quantity, tracer: Tracer, room: int, most: int) -> None:
        self.step, self.name, self.tracer, self.room = step, name, tracer, room
        own, base = getattr(step, name), tracer(step)
        if name == "batch_size":  # the batch that fits if what the step itself needs is in proportion to it
            self.degree, self.unit, self.most = 1, step.batch_unit, most
            guess = int(own * (room - base.fixed_bytes) / max(base.step_bytes, 1))
            guess = max(min(guess, most) // self.unit * self.unit, self.unit)
            others = [guess if guess != own else own + self.unit]
        else:
            context = context_of(step) or _LARGEST + step.prompt_tokens
            self.degree, self.unit, self.most = 2, 1, min(_LARGEST, context - step.prompt_tokens)
            others = [n for n in (own // 2, 2 * own) if 0 < n <= self.most]
        self.points: dict[int, dict[str, int]] = {}
        self.add(own, *others)

    def add(self, *values: int) -> None:
        """Trace the step with these values."""
        for value in values:
            phases = self.tracer(self.step.changed(**{self.name: value})).phases
            self.points[value] = {name: sum(parts.values()) for name, parts in phases.items()}

    def at(self, value: int, more: Mapping[str, float] = {}) -> float:  # noqa: B006 - never changed
        """The peak: the highest phase of the polynomials through the nearest points (Lagrange), with what is on top."""
        near = sorted(self.points, key=lambda x: abs(x - value))[: self.degree + 1]
        phases = {name: more.get(name, 0.0) for name in self.points[near[0]]}
        for x in near:
            weight = 1.0
            for y in near:
                weight *= (value - y) / (x - y) if y != x else 1.0
            for name in phases:
                phases[name] += weight * self.points[x].get(name, 0)
        return max(phases.values())

    def largest(self, more: Mapping[str, float] = {}) -> int | None:  # noqa: B006
        """The largest multiple of the unit whose peak, which grows with it, has room."""
        multiples = range(1, self.most // self.unit + 1)
        return self.unit * bisect_right(multiples, self.room, key=lambda n: self.at(n * self.unit, more)) or None

    def exact(self) -> Fit:
        """The same, where a trace says that it fits and another that the next larger one does not.

        A long completion need not be the longest.
        """
        while True:
            fits = {n: self.at(n) <= self.room for n in self.points if n <= self.most}
            good = max((n for n in fits if fits[n]), default=0)
            bad = min((n for n in fits if not fits[n]), default=(self.most // self.unit + 1) * self.unit)
            near = self.name != "batch_size" and good >= _LONG and self.room - self.at(good) <= _NEAR * self.room
            if near or good + self.unit >= bad:
                return Fit(self.name, good or None, round(self.at(good or bad)))
            self.add(min(max(self.largest() or 0, good + self.unit), bad - self.unit))


def plan(
    config: TracedConfig, budget: int, overhead: int = 0, quantities: tuple[Quantity, ...] = get_args(Quantity),
    tracer: Callable[[TracedConfig], Trace] = trace, most: int = _LARGEST,
) -> list[Fit]:  # fmt: skip
    """The largest batch, completion length and hops that fit, each with everything else as configured.

    Args:
        config: The step.
        budget: Bytes.
        overhead: Bytes that the trace leaves out (context, fragmentation), subtracted from the budget.
        quantities: What to vary. A batch grows by whole groups. Hops cost time, not memory: they fit up to T - 1 or
            not at all.
        tracer: Traces a configuration.
        most: Largest batch to consider.

    Returns:
        One `Fit` per quantity. A length of 512 tokens or more need not be the largest: it leaves at most 0.5 % of the
        room.

    Raises:
        InputError: If the weights alone do not fit.
    """
    tracer, room = remembering(tracer), budget - overhead
    fixed = tracer(config).fixed_bytes
    if room < fixed:
        needed = f"at least {fixed + overhead} bytes: weights, adapter, optimizer"
        raise InputError("fits", f"{budget} bytes", needed)
    fits = []
    for quantity in quantities:
        if quantity != "hops":
            fits.append(_Peaks(config, quantity, tracer, room, most).exact())
        elif getattr(config, "engine_name", "") == "replay":
            hops = config.max_new_tokens - 1
            peak = tracer(config.changed(hops=min(hops, 3))).peak  # as much as with more
            fits.append(Fit("hops", hops if peak <= room else None, peak))
    return fits


def ways_to_run(
    config: TracedConfig, room: int, tracer: Callable[[TracedConfig, int, Way], Trace],
    counts: Sequence[int] = GPUS, most: int = _LARGEST,
) -> list[WayToRun]:  # fmt: skip
    """All ways to run a step by GPUs, sharding and checkpointing, the cheapest that fits first; that one is traced.

    ``room``: bytes of one GPU. ``tracer``: traces a step on one of several GPUs that share it in some way. Batch and
    length of ``config`` are those that the other is varied with.
    """
    rows = []
    for again in (False, True):
        try:
            step = config.changed(gradient_checkpointing=again)
        except InputError:  # an engine that cannot
            continue
        rows += _ways_of(step, room, tracer, counts, most)
    rows.sort(key=lambda row: (row.gpu_seconds is None, row.gpu_seconds or 0, row.gpus))
    best = rows[0]
    if best.batch_size is None:
        return rows
    step = config.changed(gradient_checkpointing=best.gradient_checkpointing)
    fit = _Peaks(step, "batch_size", lambda step: tracer(step, best.gpus, best.sharding), room, most).exact()
    best = replace(best, batch_size=fit.value, peak=fit.peak, gpu_seconds=None, traced=True)
    if fit.value:
        traced = tracer(step.changed(batch_size=fit.value), best.gpus, best.sharding)
        flops, received = traced.flops // fit.value, traced.received
        seconds = _gpu_seconds(step, tracer(step, 1, "none"), flops, received, fit.value)
        best = replace(best, flops=flops, received=received, gpu_seconds=seconds)
    return [best, *rows[1:]]


def _ways_of(
    step: TracedConfig, room: int, tracer: Callable[[TracedConfig, int, Way], Trace], counts: Sequence[int], most: int
) -> list[WayToRun]:
    """One way for each number of GPUs and sharding, with or without recomputed layers as the step has them."""

    def alone(step: TracedConfig) -> Trace:
        return tracer(step, 1, "none")

    base, rows = alone(step), []
    flops = base.flops // step.batch_size
    batches, lengths = (_Peaks(step, name, alone, room, most) for name in ("batch_size", "max_new_tokens"))
    for way in get_args(Way):
        numbers = [n for n in counts if (n == 1) == (way == "none")]
        if not numbers:
            continue
        traced = min(numbers)
        try:
            shared = tracer(step, traced, way)
        except InputError:  # a step that cannot be shared in this way: of a base that is trained
            continue
        for gpus in numbers:
            more, received = {}, 0
            if gpus > 1:
                for name, there in base.phases.items():
                    here = shared.phases.get(name, there)
                    divided = (there["weights"] - here["weights"]) / (1 - 1 / traced)  # b, where N GPUs hold a + b / N
                    more[name] = sum(here.values()) - sum(there.values()) - divided * (1 / traced - 1 / gpus)
                arriving = (gpus - 1) / gpus * traced / (traced - 1)  # everything but the part that is here
                received = round(shared.received * arriving)
            batch = batches.largest(more)
            peak = round(batches.at(batch or step.batch_unit, more))
            seconds = _gpu_seconds(step, base, flops, received, batch) if batch else None
            rows.append(WayToRun(gpus, way, step.gradient_checkpointing, batch, peak, lengths.largest(more), flops,
                                 received, seconds))  # fmt: skip
    return rows


def _gpu_seconds(step: TracedConfig, base: Trace, flops: int, received: int, batch: int) -> float:
    """Estimated GPU time for one completion: a way to order settings, not a prediction of a step's time.

    Products, reading all weights for every token that is sampled (which serves the whole batch), and waiting for other
    GPUs. ``flops``: of one completion; ``received``: bytes in a step.
    """
    weights = base.categories["weights"] + base.categories["adapter"]
    tokens = step.max_new_tokens if "rollout" in base.phases else 0
    return flops / ARITHMETIC + (tokens * weights / BANDWIDTH + received / LINK) / batch


def single_changes(config: StepConfig, base: Trace, tracer: Callable[[StepConfig], Trace] = trace) -> list[Change]:
    """Single changes of a step with trace ``base`` that save memory, the largest saving first."""
    changes = []
    for name, update in config.options().items():
        try:
            step = config.changed(**update)
        except InputError:  # not with this method, engine or size
            continue
        if step != config and (peak := tracer(step).peak) < base.peak:
            changes.append(Change(name, peak, base.peak - peak))
    return sorted(changes, key=lambda change: -change.saved)


def every_method(values: Mapping[str, Any]) -> list[StepConfig]:
    """One step for every method; settings that it does not have are left out, a batch is rounded up to whole groups."""

    def has(method: str, name: str) -> bool:
        if name in ("engine", "explicit_freeing"):
            return method in RELAXED
        return reads(method, "teacher_beta" if name.startswith("teacher") else name)

    sizes = {name: value for name, value in values.items() if name == "batch_size"}
    batch, steps = StepConfig.parse(sizes).batch_size, []
    for method in METHODS:
        own = {name: value for name, value in values.items() if has(method, name) and name not in sizes}
        step = StepConfig.parse(own | {"method": method})
        steps.append(step.changed(batch_size=-(-batch // step.batch_unit) * step.batch_unit))
    return steps


def compare_methods(steps: Sequence[StepConfig], tracer: Callable[[StepConfig], Trace]) -> list[dict[str, Any]]:
    """What several methods' steps need, in bytes, or the reason why there is no trace.

    A relaxed method, for example, needs the gradient of its reward. Where no step can be traced, the first reason is
    raised.
    """
    rows, errors = [], []
    for step in steps:
        row = {"method": step.method, "config": step.model_dump(), "reason": None}
        row |= dict.fromkeys(("peak_bytes", "step_bytes", "peak_phase", "flops"))
        try:
            traced = tracer(step)
        except InputError as error:
            errors.append(error)
            row["reason"] = str(error)
        else:
            row |= dict(peak_bytes=traced.peak, step_bytes=traced.step_bytes, peak_phase=traced.peak_phase,
                        flops=traced.flops)  # fmt: skip
        rows.append(row)
    if len(errors) == len(rows):
        raise errors[0]
    return rows
