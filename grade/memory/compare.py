"""The same step with every training method: what each needs, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grade.errors import InputError
from grade.gradients.methods import METHODS, RELAXED, reads
from grade.memory.plan import changed
from grade.memory.step import StepConfig, TracedConfig
from grade.memory.trace import Trace

ALL = "all"
"""In place of a method's name: every method."""


@dataclass(frozen=True)
class MethodRow:
    """What one method's step needs.

    Attributes:
        config: The step.
        trace: Its trace; None if there is no such step.
        reason: Why there is none.
    """

    config: StepConfig
    trace: Trace | None
    reason: str = ""


def every_method(
    files: Iterable[str | Path], overrides: Sequence[str], options: Mapping[str, str], batch: int | None = None
) -> list[StepConfig]:
    """One step for every method; settings that a method does not have are left out.

    Args:
        files: As in `Config.load`.
        overrides: ``key=value``, as there.
        options: The same, by name, without the method.
        batch: Completions in a microbatch, rounded up to a method's whole groups; None: one group.

    Returns:
        Steps in the order of `METHODS`.

    Raises:
        InputError: For a wrong setting.
    """
    steps = []
    for method in METHODS:
        own = [text for text in overrides if _has(method, text.partition("=")[0].strip())]
        given = [f"{name}={value}" for name, value in options.items() if _has(method, name)]
        step = StepConfig.load(files, own, [*given, f"method={method}"])
        if batch is not None:
            step = changed(step, batch_size=-(-batch // step.batch_unit) * step.batch_unit)
        steps.append(step)
    return steps


def _has(method: str, name: str) -> bool:
    """Whether a method's step has a setting."""
    if name in ("engine", "explicit_freeing"):
        return method in RELAXED
    return reads(method, name)


def compare_methods(steps: Sequence[StepConfig], tracer: Callable[[TracedConfig], Trace]) -> list[MethodRow]:
    """Trace the steps of several methods.

    Args:
        steps: From `every_method`.
        tracer: Traces a step.

    Returns:
        A row for each, in the same order; without a trace where the step cannot be: a relaxed method needs the gradient
        of its reward.

    Raises:
        InputError: If there is no trace at all.
    """
    rows, errors = [], []
    for step in steps:
        try:
            rows.append(MethodRow(step, tracer(step)))
        except InputError as error:
            rows.append(MethodRow(step, None, str(error)))
            errors.append(error)
    if len(errors) == len(rows):
        raise errors[0]
    return rows
