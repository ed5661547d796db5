"""The largest batch that fits a budget, and which single change of a step saves most."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from grade.errors import InputError
from grade.memory.settings import StepConfig, TracedConfig
from grade.memory.trace import Trace, trace

BEYOND_TRACE = 605 * 2**20
"""Bytes that a card holds beyond a trace: 426 MiB of CUDA context, 179 MiB of workspaces and unused parts of blocks.

``nvidia-smi`` showed the first for torch 2.10 with CUDA 13.0 on an RTX 6000 Ada (unslothai/unsloth-zoo, pull request
1053); it differs from card to card. The second is a little more than replay and policy gradients took on an H100
(``docs/memory.md``, On a GPU)."""

_LARGEST = 4096  # where the search for a batch ends
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
    """The largest batch that fits (None if not even the smallest does), and the peak bytes with it."""

    batch_size: int | None
    peak: int


@dataclass(frozen=True)
class Change:
    """One change of a configuration, in words, and the peak bytes that it would need and save."""

    name: str
    peak: int
    saved: int


def largest_batch(
    config: TracedConfig, budget: int, overhead: int = 0, tracer: Callable[[TracedConfig], Trace] = trace,
    most: int = _LARGEST,
) -> Fit:  # fmt: skip
    """The largest batch that fits, with everything else as configured.

    A bisection that takes a few traces: peaks grow almost in proportion to the batch, so where a straight line through
    two of them meets the budget is tried before the middle.

    Args:
        config: The step.
        budget: Bytes.
        overhead: Bytes that the trace leaves out (context, fragmentation), subtracted from the budget.
        tracer: Traces a configuration.
        most: Largest batch to consider.

    Returns:
        The batch, of whole groups, and its peak; with None the peak of the smallest batch.
    """
    room, unit = budget - overhead, config.batch_unit
    first, groups = tracer(config), config.batch_size // unit
    peaks = {0: first.fixed_bytes, groups: first.peak}
    low, high = (groups, most // unit + 1) if first.peak <= room else (0, groups)  # low fits, high does not
    while high - low > 1:
        line = min(max(_crossing(peaks, room), low + 1), high - 1)
        for trial in (line, line + 1, (low + high) // 2):
            if low < trial < high:
                peaks[trial] = tracer(config.changed(batch_size=trial * unit)).peak
                low, high = (trial, high) if peaks[trial] <= room else (low, trial)
    return Fit(low * unit or None, peaks[low or 1])


def _crossing(peaks: dict[int, int], room: int) -> int:
    """Where the line through the two points that are nearest to the room meets it, rounded down."""
    (a, at_a), (b, at_b) = sorted(peaks.items(), key=lambda point: abs(point[1] - room))[:2]
    return int(a + (room - at_a) * (b - a) / (at_b - at_a)) if at_a != at_b else max(peaks)


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
