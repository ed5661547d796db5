"""Traces, and what is made of them, as text for people and as JSON for programs.

`pandas.DataFrame.to_string` would align the tables as well, after half a second of imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grade.errors import InputError
from grade.memory.allocator import COMMUNICATION, CONTEXT, Reserved
from grade.memory.plan import Change, Fit, WayToRun
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace

_BAR = 36
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


@dataclass(frozen=True)
class Report:
    """What ``grade memory`` says of a step."""

    config: StepConfig
    trace: Trace
    gpus: int = 1
    overhead: int = 0
    budget: int | None = None
    reserved: Reserved | None = None
    fits: Sequence[Fit] = ()
    changes: Sequence[Change] = ()
    ways: Sequence[WayToRun] = ()

    @property
    def outside(self) -> dict[str, int]:
        """Bytes that a process takes outside the allocator."""
        return {"context": CONTEXT} | ({"communication": COMMUNICATION} if self.gpus > 1 else {})

    def json(self) -> dict[str, Any]:
        """Plain values, all sizes in bytes."""
        trace, held = self.trace, self.reserved
        return {
            "config": self.config.model_dump(),
            "peak_bytes": trace.peak,
            "overhead_bytes": self.overhead,
            "gpus": self.gpus,
            "received_bytes": trace.received,
            "peak_phase": trace.peak_phase,
            "categories": trace.categories,
            "phases": trace.phases,
            "largest": [vars(t) | {"shape": list(t.shape)} for t in trace.largest],
            "flops": trace.flops,
            "layers": trace.layers,
            "traced_layers": trace.traced_layers,
            "seconds": trace.seconds,
            "fits": [vars(f) for f in self.fits],
            "changes": [vars(c) for c in self.changes],
            "settings": [vars(s) for s in self.ways],
            "reserved": None if held is None else vars(held) | {"fragmentation": held.fragmentation},
            "beside_the_allocator": self.outside,
        }

    def text(self) -> str:
        """Lines for people."""
        trace, held = self.trace, self.reserved
        how = f"{trace.traced_layers} of {trace.layers} layers traced, the rest extrapolated"
        how = "all layers traced" if trace.traced_layers == trace.layers else how
        lines = [
            self.config.headline,
            f"peak {_size(trace.peak)}, in phase {trace.peak_phase} ({how}; {trace.seconds:.0f} s)",
            f"{trace.flops / 1e12:.4g} TFLOP in products and attention",
        ]
        if self.gpus > 1:
            share = "which divide the base" if "gathered" in trace.categories else "each with the whole base"
            received = f"{_size(trace.received)} received from the others in a step"
            lines.append(f"one of {self.gpus} GPUs, {share}; {received}")
        if self.overhead:
            lines.append(f"with overhead of {_size(self.overhead)}: {_size(trace.peak + self.overhead)}")
        phases = {name: sum(parts.values()) for name, parts in trace.phases.items()}
        for title, sizes in (("at the peak", trace.categories), ("peak of each phase", phases)):
            lines += ["", title]
            lines += [
                f"  {name:<12} {_size(n):>11}  {'█' * round(_BAR * n / trace.peak)}"
                for name, n in sizes.items() if n or sizes is phases
            ]  # fmt: skip
        if held is not None:
            lines += ["", f"reserved {_size(held.reserved)} by the caching allocator ({held.fragmentation:.1%} of it "
                      f"never in use at once), {_size(held.reserved + sum(self.outside.values()))} with the CUDA "
                      + " and ".join(self.outside)]  # fmt: skip
        lines += ["", "largest tensors that the step made"]
        for t in trace.largest:
            start = f"  {_size(t.nbytes):>11}  {t.category:<12} {t.dtype:<9} {list(t.shape)!s:<22}"
            lines.append(f"{start} {t.module or t.op} ({t.phase})")
        if self.fits:
            lines += ["", f"largest that fits {_size(self.budget)}, all else equal"]
            for fit in self.fits:
                peak = _size(fit.peak)
                value = f"none: {peak} even with the smallest" if fit.value is None else f"{fit.value}  ({peak})"
                lines.append(f"  {fit.quantity:<16} {value}")
        if self.changes:
            lines += ["", "single changes that save"]
            lines += [f"  {_size(c.saved):>11}  {c.name}  (peak {_size(c.peak)})" for c in self.changes]
        if self.ways:
            order = "the least estimated GPU time for a completion first (~: not traced)"
            lines += ["", f"settings that fit {_size(self.budget)} on each GPU, {order}", _HEAD]
            lines += [_way(way) for way in self.ways]
        return "\n".join(lines)


def _way(way: WayToRun) -> str:
    layers = "recomputed" if way.gradient_checkpointing else "kept"
    start, peak = f"  {way.gpus:>4}  {way.sharding:<8}  {layers:<12}", (" " if way.traced else "~") + _size(way.peak)
    if way.batch_size is None:
        return f"{start}{'none':>10}{peak:>12}"
    longest = "none" if way.max_new_tokens is None else f"~{way.max_new_tokens}"
    line = f"{start}{way.batch_size:>10}{peak:>12}{longest:>11}{way.flops / 1e12:>11.3g}"
    return f"{line}{_size(way.received):>13}{way.gpu_seconds:>13.3g}"


def methods_text(rows: Sequence[tuple[StepConfig, Trace | InputError]]) -> str:
    """What every method needs, one line each, from `grade.memory.plan.compare_methods`."""
    lines = [f"{'method':<14}{'B':>5}  {'peak':>11}  {'step':>11}  {'TFLOP':>8}  peak phase"]
    for config, trace in rows:
        needs = str(trace)
        if isinstance(trace, Trace):
            sizes = f"{_size(trace.peak):>11}  {_size(trace.step_bytes):>11}"
            needs = f"{sizes}  {trace.flops / 1e12:>8.4g}  {trace.peak_phase}"
        lines.append(f"{config.method:<14}{config.batch_size:>5}  {needs}")
    return "\n".join([*lines, "", "step: the peak without weights, adapter and optimizer"])


def methods_json(rows: Sequence[tuple[StepConfig, Trace | InputError]]) -> list[dict[str, Any]]:
    """The same as a list of dictionaries, all sizes in bytes."""
    return [
        {"method": config.method, "config": config.model_dump(), "reason": str(trace), "peak_bytes": None,
         "step_bytes": None, "peak_phase": None, "flops": None}
        if isinstance(trace, InputError) else
        {"method": config.method, "config": config.model_dump(), "reason": None, "peak_bytes": trace.peak,
         "step_bytes": trace.step_bytes, "peak_phase": trace.peak_phase, "flops": trace.flops}
        for config, trace in rows
    ]  # fmt: skip
