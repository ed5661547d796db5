"""Traces, and what is made of them, as text for people and as JSON for programs.

`pandas.DataFrame.to_string` would align the tables as well, after half a second of imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grade.memory.allocator import COMMUNICATION, CONTEXT, Reserved
from grade.memory.plan import Change, Fit, WayToRun
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace

_HEAD = (f"  {'GPUs':>4}  {'sharding':<8}  {'layers':<12}{'largest B':>10}{'peak':>12}{'longest T':>11}{'TFLOP':>11}"
         f"{'received':>13}{'GPU seconds':>13}")  # fmt: skip


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
    config: StepConfig, trace: Trace, *, gpus: int = 1, overhead: int = 0, reserved: Reserved | None = None,
    fits: Sequence[Fit] = (), changes: Sequence[Change] = (), ways: Sequence[WayToRun] = (),
) -> dict[str, Any]:  # fmt: skip
    """What ``grade memory`` says of a step as plain values, all sizes in bytes."""
    return {
        "config": config.model_dump(),
        "peak_bytes": trace.peak,
        "overhead_bytes": overhead,
        "gpus": gpus,
        "received_bytes": trace.received,
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
        "settings": [vars(w) for w in ways],
        "reserved": reserved and vars(reserved) | {"fragmentation": reserved.fragmentation},
        "beside_the_allocator": {"context": CONTEXT} | ({"communication": COMMUNICATION} if gpus > 1 else {}),
    }


def text(headline: str, data: dict[str, Any], budget: int | None = None) -> str:
    """The same as lines for people, below a first line."""
    peak, categories, held = data["peak_bytes"], data["categories"], data["reserved"]
    how = f"{data['traced_layers']} of {data['layers']} layers traced, the rest extrapolated"
    how = "all layers traced" if data["traced_layers"] == data["layers"] else how
    lines = [
        headline,
        f"peak {_size(peak)}, in phase {data['peak_phase']} ({how}; {data['seconds']:.0f} s)",
        f"{data['flops'] / 1e12:.4g} TFLOP in products and attention",
    ]
    if data["gpus"] > 1:
        share = "which divide the base among them" if "gathered" in categories else "each with the whole base"
        received = f"{_size(data['received_bytes'])} received from the others in a step"
        lines.append(f"one of {data['gpus']} GPUs, {share}; {received}")
    if overhead := data["overhead_bytes"]:
        lines.append(f"with overhead of {_size(overhead)}: {_size(peak + overhead)}")
    lines += ["", "at the peak", *(_bar(name, n, peak) for name, n in categories.items() if n)]
    lines += ["", "peak of each phase"]
    lines += [_bar(name, sum(parts.values()), peak) for name, parts in data["phases"].items()]
    if held is not None:
        outside = data["beside_the_allocator"]
        lines += ["", f"reserved {_size(held['reserved'])} by the caching allocator ({held['fragmentation']:.1%} of it "
                  f"never in use at the same time), {_size(held['reserved'] + sum(outside.values()))} with the CUDA "
                  + " and ".join(outside)]  # fmt: skip
    lines += ["", "largest tensors that the step made"]
    for t in data["largest"]:
        start = f"  {_size(t['nbytes']):>11}  {t['category']:<12} {t['dtype']:<9} {t['shape']!s:<22}"
        lines.append(f"{start} {t['module'] or t['op']} ({t['phase']})")
    if data["fits"]:
        lines += ["", f"largest that fits {_size(budget)}, all else equal"]
        for fit in data["fits"]:
            size, value = _size(fit["peak"]), fit["value"]
            value = f"none: {size} even with the smallest" if value is None else f"{value}  ({size})"
            lines.append(f"  {fit['quantity']:<16} {value}")
    if data["changes"]:
        lines += ["", "single changes that save"]
        lines += [f"  {_size(c['saved']):>11}  {c['name']}  (peak {_size(c['peak'])})" for c in data["changes"]]
    if data["settings"]:
        order = "least estimated GPU time per completion first (~: not traced)"
        lines += ["", f"settings that fit {_size(budget)} on each GPU, {order}", _HEAD, *map(_way, data["settings"])]
    return "\n".join(lines)


def _bar(name: str, nbytes: int, peak: int) -> str:
    return f"  {name:<12} {_size(nbytes):>11}  {'█' * round(36 * nbytes / peak)}"


def _way(way: dict[str, Any]) -> str:
    layers, mark = "recomputed" if way["gradient_checkpointing"] else "kept", " " if way["traced"] else "~"
    line = f"  {way['gpus']:>4}  {way['sharding']:<8}  {layers:<12}{way['batch_size'] or 'none':>10}"
    line += f"{mark + _size(way['peak']):>12}"
    if way["batch_size"] is None:
        return line
    longest = f"~{way['max_new_tokens']}" if way["max_new_tokens"] else "none"
    line += f"{longest:>11}{way['flops'] / 1e12:>11.3g}"
    return f"{line}{_size(way['received']):>13}{way['gpu_seconds']:>13.3g}"


def methods_text(rows: Sequence[dict[str, Any]]) -> str:
    """What every method needs, one line each, from `grade.memory.plan.compare_methods`."""
    lines = [f"{'method':<14}{'B':>5}  {'peak':>11}  {'step':>11}  {'TFLOP':>8}  peak phase"]
    for row in rows:
        needs = row["reason"]
        if needs is None:
            sizes = f"{_size(row['peak_bytes']):>11}  {_size(row['step_bytes']):>11}"
            needs = f"{sizes}  {row['flops'] / 1e12:>8.4g}  {row['peak_phase']}"
        lines.append(f"{row['method']:<14}{row['config']['batch_size']:>5}  {needs}")
    return "\n".join([*lines, "", "step: the peak without weights, adapter and optimizer"])
