"""What fits a budget, and which single change saves most: bisection and comparison over traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from grade.errors import InputError
from grade.memory.models import model_config
from grade.memory.step import StepConfig
from grade.memory.trace import Trace, trace

Quantity = Literal["batch_size", "max_new_tokens", "hops"]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
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
    """One change of a configuration and what it would need.

    Attributes:
        name: What changes, readable.
        peak: Peak bytes with it.
        saved: Bytes less than without.
    """

    name: str
    peak: int
    saved: int


@dataclass(frozen=True)
class Fit:
    """The largest value of one quantity that fits.

    Attributes:
        quantity: Which.
        value: The largest that fits; None if not even the smallest does.
        peak: Peak bytes with it, or with the smallest.
    """

    quantity: Quantity
    value: int | None
    peak: int


def plan(
    config: StepConfig, budget: int, overhead: int = 0, quantities: tuple[Quantity, ...] = get_args(Quantity),
    tracer: Callable[[StepConfig], Trace] = trace,
) -> list[Fit]:  # fmt: skip
    """The largest batch, completion length and hops that fit, each with everything else as configured.

    Args:
        config: The step.
        budget: Bytes.
        overhead: Bytes that the trace leaves out (context, fragmentation), subtracted from the budget.
        quantities: What to vary. Hops cost time, not memory: they fit up to T - 1 or not at all.
        tracer: How a configuration becomes a trace.

    Returns:
        One `Fit` a quantity.

    Raises:
        InputError: If the weights alone do not fit.
    """
    room = budget - overhead
    smallest = tracer(config.model_copy(update={"batch_size": 1, "max_new_tokens": 1, "hops": 0}))
    fixed = smallest.peak - smallest.step_bytes
    if room < fixed:
        raise InputError("fits", f"{budget} bytes", f"at least {fixed + overhead} bytes: weights, adapter, optimizer")
    context = getattr(model_config(config.model), "max_position_embeddings", None) or LARGEST
    limits = {
        "batch_size": LARGEST,
        "max_new_tokens": min(LARGEST, context - config.prompt_tokens),
        "hops": max(config.max_new_tokens - 1, 0),
    }
    fits = []
    for quantity in quantities:
        if quantity == "hops" and config.engine_name != "replay":
            continue
        low = 0 if quantity == "hops" else 1
        value, peak = _largest(config, quantity, low, limits[quantity], room, tracer)
        fits.append(Fit(quantity, value, peak))
    return fits


def _largest(config, quantity: Quantity, low: int, high: int, room: int, tracer) -> tuple[int | None, int]:
    """Largest value in [low, high] whose peak is at most ``room``; peaks grow with the value."""

    def peak(value: int) -> int:
        return tracer(config.model_copy(update={quantity: value})).peak

    best = peak(low)
    if best > room:
        return None, best
    good, step = low, max(1, low)
    while good < high:  # double until it does not fit
        value = min(good + step, high)
        new = peak(value)
        if new > room:
            high = value - 1
            break
        good, best, step = value, new, 2 * step
    while good < high:
        value = (good + high + 1) // 2
        new = peak(value)
        if new <= room:
            good, best = value, new
        else:
            high = value - 1
    return good, best


def single_changes(config: StepConfig, base: Trace, tracer: Callable[[StepConfig], Trace] = trace) -> list[Change]:
    """What each single change of the configuration would need, the largest saving first.

    Args:
        config: The step.
        base: Its trace.
        tracer: How a configuration becomes a trace.

    Returns:
        Changes that save something.
    """
    options: dict[str, dict] = {
        "one base in three roles": {"base_copies": 1},
        "engine replay": {"engine": "replay"},
        "engine checkpointed": {"engine": "checkpointed"},
        "gradient checkpointing": {"gradient_checkpointing": True},
        "bfloat16 base": {"dtype": "bfloat16"},
        "LoRA instead of all weights": {"adapter": "lora"},
        "fused attention (sdpa)": {"attention": "sdpa"},
        "reward on the embedding table": {"reward": "bag"},
        "a support of 256 tokens": {"gumbel_topk": 256},
        "half the batch": {"batch_size": max(1, config.batch_size // 2)},
        "half the completion": {"max_new_tokens": max(1, config.max_new_tokens // 2)},
    }
    changes = []
    for name, update in options.items():
        key = next(iter(update))
        now = config.engine_name if key == "engine" else getattr(config, key)
        worse = key == "gumbel_topk" and 0 < now <= 256
        if worse or now == update[key] or (key == "gradient_checkpointing" and config.engine_name == "checkpointed"):
            continue
        if key == "engine" and now == "replay":
            continue
        if key == "engine":
            update = update | {"gradient_checkpointing": False, "explicit_freeing": False}
        peak = tracer(config.model_copy(update=update)).peak
        if peak < base.peak:
            changes.append(Change(name, peak, base.peak - peak))
    return sorted(changes, key=lambda change: -change.saved)
