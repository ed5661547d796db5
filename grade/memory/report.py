"""Traces, and what is made of them, as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grade.memory.step import StepConfig
from grade.memory.trace import Trace

if TYPE_CHECKING:
    from grade.memory.allocator import Replay
    from grade.memory.compare import MethodRow
    from grade.memory.plan import Change, Fit
    from grade.memory.settings import Setting

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
    budget: int | None = None, gpus: int = 1, replay: Replay | None = None, settings: Sequence[Setting] = (),
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
        replay: From `grade.memory.allocator.reserved`.
        settings: From `grade.memory.settings.settings`.

    Returns:
        Lines of text.
    """
    how = f"{trace.traced_layers} of {trace.layers} layers traced, the rest extrapolated"
    how = "all layers traced" if trace.traced_layers == trace.layers else how
    lines = [config.headline, f"peak {size(trace.peak)}, in phase {trace.peak_phase} ({how}; {trace.seconds:.0f} s)"]
    lines.append(f"{trace.flops / 1e12:.4g} TFLOP in products and attention")
    if gpus > 1:
        lines.append(f"one of {gpus} GPUs, {_together(trace)}")
    if overhead:
        lines.append(f"with overhead of {size(overhead)}: {size(trace.peak + overhead)}")
    lines += ["", "at the peak"]
    lines += [_bar(name, trace.categories[name], trace.peak) for name in trace.categories if trace.categories[name]]
    lines += ["", "peak of each phase"]
    lines += [_bar(name, sum(parts.values()), trace.peak) for name, parts in trace.phases.items()]
    if replay is not None:
        lines += ["", *_reserved(replay, gpus)]
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
    if settings:
        lines += ["", *_settings(settings, budget)]
    return "\n".join(lines)


def as_json(
    config: StepConfig, trace: Trace, overhead: int = 0, fits: Sequence[Fit] = (), changes: Sequence[Change] = (),
    gpus: int = 1, replay: Replay | None = None, settings: Sequence[Setting] = (),
) -> dict[str, Any]:  # fmt: skip
    """The same as a dictionary of plain values, all sizes in bytes."""
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
        "settings": [vars(s) for s in settings],
        "reserved": None if replay is None else vars(replay) | {"fragmentation": replay.fragmentation},
        "beside_the_allocator": outside(gpus),
    }


def outside(gpus: int = 1) -> dict[str, int]:
    """Bytes that a process takes outside the allocator, from `grade.memory.allocator`'s constants."""
    from grade.memory.allocator import COMMUNICATION, CONTEXT  # here: a report of anything else needs no allocator

    return {"context": CONTEXT} | ({"communication": COMMUNICATION} if gpus > 1 else {})


def methods_text(rows: Sequence[MethodRow]) -> str:
    """What every method needs, one line each."""
    lines = [f"{'method':<14}{'B':>5}  {'peak':>11}  {'step':>11}  {'TFLOP':>8}  peak phase"]
    for row in rows:
        start = f"{row.config.method:<14}{row.config.batch_size:>5}"
        if row.trace is None:
            lines.append(f"{start}  {row.reason}")
            continue
        t = row.trace
        sizes = f"{size(t.peak):>11}  {size(t.step_bytes):>11}  {t.flops / 1e12:>8.4g}"
        lines.append(f"{start}  {sizes}  {t.peak_phase}")
    return "\n".join([*lines, "", "step: the peak without weights, adapter and optimizer"])


def methods_json(rows: Sequence[MethodRow]) -> list[dict[str, Any]]:
    """The same as a list of dictionaries, all sizes in bytes."""
    return [
        {
            "method": row.config.method, "config": row.config.model_dump(), "reason": row.reason or None,
            "peak_bytes": row.trace and row.trace.peak, "step_bytes": row.trace and row.trace.step_bytes,
            "peak_phase": row.trace and row.trace.peak_phase, "flops": row.trace and row.trace.flops,
        }
        for row in rows
    ]  # fmt: skip


def _reserved(replay: Replay, gpus: int) -> list[str]:
    beside = outside(gpus)
    what = " and communication" if "communication" in beside else ""
    return [
        f"reserved {size(replay.reserved)} by the caching allocator ({replay.fragmentation:.1%} of it never in use at "
        f"once), {size(replay.reserved + sum(beside.values()))} with the CUDA context{what}",
    ]


def _settings(settings: Sequence[Setting], budget: int | None) -> list[str]:
    """A table of settings; numbers that no trace has checked are marked."""
    title = "settings" if budget is None else f"settings that fit {size(budget)}"
    lines = [f"{title} on each GPU, the least estimated GPU time for a completion first (~: not traced)"]
    head = f"  {'GPUs':>4}  {'sharding':<8}  {'layers':<12}{'largest B':>10}{'peak':>12}{'longest T':>11}"
    lines.append(head + f"{'TFLOP':>11}{'received':>13}{'GPU seconds':>13}")
    for s in settings:
        layers, about = "recomputed" if s.gradient_checkpointing else "kept", " " if s.traced else "~"
        start = f"  {s.gpus:>4}  {s.sharding:<8}  {layers:<12}"
        if s.batch_size is None:
            lines.append(f"{start}{'none':>10}{about + size(s.peak):>12}")
            continue
        longest = "none" if s.max_new_tokens is None else f"~{s.max_new_tokens}"
        line = f"{start}{s.batch_size:>10}{about + size(s.peak):>12}{longest:>11}{s.flops / 1e12:>11.3g}"
        lines.append(f"{line}{size(s.received):>13}{s.gpu_seconds:>13.3g}")
    return lines


def _together(trace: Trace) -> str:
    """What several GPUs do, in words."""
    if not trace.received:
        return "which divide weights, gradients and optimizer"
    what = "which divide the base" if "gathered" in trace.categories else "each with the whole base"
    return f"{what}; {size(trace.received)} received from the others in a step"


def _bar(name: str, nbytes: int, whole: int) -> str:
    return f"  {name:<12} {size(nbytes):>11}  {'█' * round(_BAR * nbytes / whole)}"
