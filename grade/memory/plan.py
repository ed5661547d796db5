"""What fits a budget, and which single change saves most: a search and comparisons over traces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from grade.errors import InputError
from grade.gradients.methods import OPTIONS
from grade.memory.models import model_config
from grade.memory.step import StepConfig, TracedConfig
from grade.memory.trace import Trace, trace

Quantity = Literal["batch_size", "max_new_tokens", "hops"]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_CLEARLY = 0.75  # of the slope: one more of a quantity costs at least this part of what it cost on average before
_NEAR = 0.005
LONG = 512
"""Tokens from which on a trace takes so long that a length near the largest one is good enough."""
LARGEST = 4096
"""Where the search for a batch or a length ends."""


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
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", str(text))
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise InputError(field, text, "a positive number with B, kB, MB, GB, KiB, MiB or GiB, for example 24GiB")
    return round(float(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True)
class Change:
    """One change of a configuration and the memory it would need.

    Attributes:
        name: The change, in words.
        peak: Peak bytes with the change.
        saved: Bytes saved by it.
    """

    name: str
    peak: int
    saved: int


@dataclass(frozen=True)
class Fit:
    """The largest value of one quantity that fits.

    Attributes:
        quantity: Its name.
        value: The largest that fits; None if not even the smallest does.
        peak: Peak bytes with it, or with the smallest.
    """

    quantity: Quantity
    value: int | None
    peak: int


def remembering(tracer: Callable[..., Trace]) -> Callable[..., Trace]:
    """A tracer that traces no step twice: a plan, settings and single changes share some."""
    known: dict[tuple, Trace] = {}

    def found(config: TracedConfig, *more: Any) -> Trace:
        key = (type(config).__name__, config.model_dump_json(), *more)
        if key not in known:
            known[key] = tracer(config, *more)
        return known[key]

    return found


def plan(
    config: TracedConfig, budget: int, overhead: int = 0, quantities: tuple[Quantity, ...] = get_args(Quantity),
    tracer: Callable[[TracedConfig], Trace] = trace, most: int = LARGEST, first: Mapping[Quantity, int] | None = None,
) -> list[Fit]:  # fmt: skip
    """The largest batch, completion length and hops that fit, each with everything else as configured.

    Args:
        config: The step.
        budget: Bytes.
        overhead: Bytes that the trace leaves out (context, fragmentation), subtracted from the budget.
        quantities: What to vary. A batch grows by whole groups. Hops cost time, not memory: they fit up to T - 1 or
            not at all. Where two and three hops need the same, more are not traced.
        most: Largest batch to consider.
        tracer: Traces a configuration.
        first: Values to try first.

    Returns:
        One `Fit` per quantity. A length of `LONG` tokens or more need not be the largest: it leaves at most a
        `_NEAR` of the room.

    Raises:
        InputError: If the weights alone do not fit.
    """
    room = budget - overhead
    quantities = tuple(q for q in quantities if q != "hops" or getattr(config, "engine_name", "") == "replay")
    smallest = tracer(changed(config, batch_size=config.batch_unit, max_new_tokens=1))
    fixed = smallest.peak - smallest.step_bytes
    if room < fixed:
        raise InputError("fits", f"{budget} bytes", f"at least {fixed + overhead} bytes: weights, adapter, optimizer")
    context = config.longest(model_config(config.model)) or LARGEST + config.prompt_tokens
    limits = {
        "batch_size": most,
        "max_new_tokens": min(LARGEST, context - config.prompt_tokens),
        "hops": max(config.max_new_tokens - 1, 0),
    }
    fits = []
    for quantity in quantities:
        low, unit = 0 if quantity == "hops" else 1, config.batch_unit if quantity == "batch_size" else 1
        if quantity == "hops" and limits["hops"] > 3:
            two, three = (tracer(changed(config, hops=hops)).peak for hops in (2, 3))
            if two == three:
                fits.append(Fit(quantity, limits["hops"] if two <= room else None, two))
                continue
        start = (first or {}).get(quantity) or getattr(config, quantity)
        value, peak = _largest(config, quantity, low, max(limits[quantity] // unit, low), room, tracer, unit, start)
        fits.append(Fit(quantity, value, peak))
    return fits


def changed(config: TracedConfig, **values: Any) -> TracedConfig:
    """A copy with other values, checked like any configuration."""
    return type(config).parse(config.model_dump() | values)


def _largest(
    config: TracedConfig, quantity: Quantity, low: int, high: int, room: int, tracer: Callable[[TracedConfig], Trace],
    unit: int, start: int,
) -> tuple[int | None, int]:  # fmt: skip
    """Largest multiple of ``unit``, low to high times, whose peak is at most ``room``; peaks grow almost linearly.

    So each trial is where the line through two known points meets the budget; every third one bisects instead. The
    first two points are the smallest value and ``start``. The next larger value is not tried where the line is clearly
    above the budget, nor where a trace of a long completion is near it.
    """

    def peak(multiple: int) -> int:
        return tracer(changed(config, **{quantity: multiple * unit})).peak

    known = {low: peak(low)}
    if known[low] > room:
        return None, known[low]
    good, bad, before = low, high + 1, low  # the largest that fits, the smallest that does not
    trial = min(max(start // unit, low + 1), high)
    while bad - good > 1:
        known[trial] = peak(trial)
        if known[trial] <= room:
            before, good = good, trial
        else:
            bad = trial
        other = bad if bad in known else before
        slope = (known[other] - known[good]) / (other - good)
        near = quantity == "max_new_tokens" and good >= LONG and room - known[good] <= _NEAR * room
        if near or (slope > 0 and known[good] + _CLEARLY * slope > room and good > low):
            break
        guess = int(good + (room - known[good]) / slope) if slope > 0 else bad - 1
        if bad in known and len(known) % 3 == 0:
            guess = (good + bad) // 2
        trial = min(max(guess, good + 1), bad - 1)
    return good * unit, known[good]


def single_changes(config: StepConfig, base: Trace, tracer: Callable[[StepConfig], Trace] = trace) -> list[Change]:
    """The memory that each single change of the configuration would need, largest saving first.

    Args:
        config: The step.
        base: Its trace.
        tracer: Traces a configuration.

    Returns:
        Changes that save memory.
    """
    changes = []
    for name, update in _options(config).items():
        peak = tracer(changed(config, **update)).peak
        if peak < base.peak:
            changes.append(Change(name, peak, base.peak - peak))
    return sorted(changes, key=lambda change: -change.saved)


def _options(config: StepConfig) -> dict[str, dict[str, Any]]:
    """Single changes of a step that could save memory, by name."""
    engine, lean = config.engine_name, dict(gradient_checkpointing=False, explicit_freeing=False)
    half, share = config.batch_size // 2, 2 * config.minibatches
    # name: whether it would be a change, and the change
    options: dict[str, tuple[bool, dict[str, Any]]] = {
        "one base in three roles": (config.base_copies > 1, dict(base_copies=1)),
        "engine replay": (engine in ("unrolled", "checkpointed"), dict(engine="replay", **lean)),
        "engine checkpointed": (engine == "unrolled", dict(engine="checkpointed", **lean)),
        "gradient checkpointing": (
            engine != "checkpointed" and not config.gradient_checkpointing, dict(gradient_checkpointing=True),
        ),
        "bfloat16 base": (config.dtype == "float32", dict(dtype="bfloat16")),
        "LoRA instead of all weights": (config.adapter == "full", dict(adapter="lora")),
        "fused attention (sdpa)": (config.attention == "eager", dict(attention="sdpa")),
        "reward on the embedding table": (config.reward != "bag", dict(reward="bag")),
        "a support of 256 tokens": (
            engine is not None and not 0 < config.gumbel_topk <= 256, dict(gumbel_topk=256),
        ),
        "KL from the sampled tokens (k3)": (engine is None and config.kl_estimator == "exact", dict(kl_estimator="k3")),
        f"{share} minibatches": (
            config.method in OPTIONS["minibatches"] and config.batch_size % share == 0, dict(minibatches=share),
        ),
        "half the batch": (half > 0 and half % config.batch_unit == 0, dict(batch_size=half)),
        "half the completion": (config.max_new_tokens > 1, dict(max_new_tokens=config.max_new_tokens // 2)),
    }  # fmt: skip
    return {name: update for name, (differs, update) in options.items() if differs}
