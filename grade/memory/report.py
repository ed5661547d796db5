"""A trace, and what fits and saves, as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grade.memory.plan import Change, Fit
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace


def _size(nbytes: float) -> str:
    """A readable size in binary units.

    >>> _size(512), _size(25769803776), _size(-1572864)
    ('512 B', '24.00 GiB', '-1.50 MiB')
    """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes:.0f} B"


def report(
    config: StepConfig, trace: Trace, overhead: int = 0, fit: Fit | None = None, changes: Sequence[Change] = ()
) -> dict[str, Any]:
    """What ``grade memory`` says of a step as plain values, all sizes in bytes."""
    return {
        "config": config.model_dump(),
        "peak_bytes": trace.peak,
        "overhead_bytes": overhead,
        "peak_phase": trace.peak_phase,
        "categories": trace.categories,
        "phases": trace.phases,
        "largest": [vars(t) | {"shape": list(t.shape)} for t in trace.largest],
        "flops": trace.flops,
        "layers": trace.layers,
        "traced_layers": trace.traced_layers,
        "seconds": trace.seconds,
        "fit": fit and vars(fit),
        "changes": [vars(c) for c in changes],
    }


def text(headline: str, data: dict[str, Any], budget: int | None = None) -> str:
    """The same as lines for people, below a first line."""
    peak, categories, fit = data["peak_bytes"], data["categories"], data["fit"]
    how = f"{data['traced_layers']} of {data['layers']} layers traced, the rest extrapolated"
    how = "all layers traced" if data["traced_layers"] == data["layers"] else how
    lines = [
        headline,
        f"peak {_size(peak)}, in phase {data['peak_phase']} ({how}; {data['seconds']:.0f} s)",
        f"{data['flops'] / 1e12:.4g} TFLOP in products and attention",
    ]
    if overhead := data["overhead_bytes"]:
        lines.append(f"with overhead of {_size(overhead)}: {_size(peak + overhead)}")
    lines += ["", "at the peak", *(_bar(name, n, peak) for name, n in categories.items() if n)]
    lines += ["", "peak of each phase"]
    lines += [_bar(name, sum(parts.values()), peak) for name, parts in data["phases"].items()]
    lines += ["", "largest tensors that the step made"]
    for t in data["largest"]:
        start = f"  {_size(t['nbytes']):>11}  {t['category']:<12} {t['dtype']:<9} {t['shape']!s:<22}"
        lines.append(f"{start} {t['module'] or t['op']} ({t['phase']})")
    if fit is not None:
        size, batch = _size(fit["peak"]), fit["batch_size"]
        found = f"batch size {batch}  (peak {size})" if batch else f"no batch: {size} even with the smallest"
        lines += ["", f"largest that fits {_size(budget)}, all else equal", f"  {found}"]
    if data["changes"]:
        lines += ["", "single changes that save"]
        lines += [f"  {_size(c['saved']):>11}  {c['name']}  (peak {_size(c['peak'])})" for c in data["changes"]]
    return "\n".join(lines)


def _bar(name: str, nbytes: int, peak: int) -> str:
    return f"  {name:<12} {_size(nbytes):>11}  {'█' * round(36 * nbytes / peak)}"
