"""A trace as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grade.memory.live import CATEGORIES
from grade.memory.step import StepConfig
from grade.memory.trace import Trace

if TYPE_CHECKING:
    from grade.memory.plan import Change, Fit

_BAR = 36


def size(nbytes: float) -> str:
    """A readable size in binary units.

    >>> size(512), size(25769803776), size(-1572864)
    ('512 B', '24.00 GiB', '-1.50 MiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def as_text(
    config: StepConfig, trace: Trace, overhead: int = 0, fits: Sequence[Fit] = (), changes: Sequence[Change] = (),
    budget: int | None = None, gpus: int = 1,
) -> str:  # fmt: skip
    """The report that ``python -m grade memory`` prints.

    Args:
        config: The step.
        trace: Its trace.
        overhead: Bytes added on top of the traced peak.
        fits: From `grade.memory.plan.plan`.
        changes: From `grade.memory.plan.single_changes`.
        budget: The budget, if there is one.
        gpus: Number of GPUs that share the weights.

    Returns:
        Lines of text.
    """
    how = f"{trace.traced_layers} of {trace.layers} layers traced, the rest extrapolated"
    how = "all layers traced" if trace.traced_layers == trace.layers else how
    lines = [config.headline, f"peak {size(trace.peak)}, in phase {trace.peak_phase} ({how}; {trace.seconds:.0f} s)"]
    lines.append(f"{trace.flops / 1e12:.4g} TFLOP in products and attention")
    if gpus > 1:
        lines.append(f"one of {gpus} GPUs that divide weights, gradients and optimizer")
    if overhead:
        lines.append(f"with overhead of {size(overhead)}: {size(trace.peak + overhead)}")
    lines += ["", "at the peak"]
    lines += [_bar(name, trace.categories[name], trace.peak) for name in CATEGORIES if trace.categories[name]]
    lines += ["", "peak of each phase"]
    lines += [_bar(name, sum(parts.values()), trace.peak) for name, parts in trace.phases.items()]
    lines += ["", "largest tensors that the step made"]
    for t in trace.largest:
        made = t.module or t.op
        lines.append(f"  {size(t.nbytes):>11}  {t.category:<12} {t.dtype:<9} {list(t.shape)!s:<22} {made} ({t.phase})")
    if fits:
        lines += ["", f"largest that fits {size(budget)}, all else equal"]
        for fit in fits:
            found = f"none: {size(fit.peak)} even with the smallest" if fit.value is None else str(fit.value)
            lines.append(f"  {fit.quantity:<16} {found}" + ("" if fit.value is None else f"  ({size(fit.peak)})"))
    if changes:
        lines += ["", "single changes that save"]
        lines += [f"  {size(c.saved):>11}  {c.name}  (peak {size(c.peak)})" for c in changes]
    return "\n".join(lines)


def as_json(
    config: StepConfig, trace: Trace, overhead: int = 0, fits: Sequence[Fit] = (), changes: Sequence[Change] = (),
    gpus: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The same as a dictionary of plain values, all sizes in bytes."""
    return {
        "config": config.model_dump(),
        "peak_bytes": trace.peak,
        "overhead_bytes": overhead,
        "gpus": gpus,
        "peak_phase": trace.peak_phase,
        "categories": trace.categories,
        "phases": trace.phases,
        "largest": [vars(t) | {"shape": list(t.shape)} for t in trace.largest],
        "flops": trace.flops,
        "layers": trace.layers,
        "traced_layers": trace.traced_layers,
        "seconds": trace.seconds,
        "fits": [vars(f) for f in fits],
        "changes": [vars(c) for c in changes],
    }


def _bar(name: str, nbytes: int, whole: int) -> str:
    return f"  {name:<12} {size(nbytes):>11}  {'█' * round(_BAR * nbytes / whole)}"
