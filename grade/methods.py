"""Methods by name: each is a choice of estimator and engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from grade.engines import Engine, checkpointed, replay, unrolled
from grade.relaxation import Estimator

MethodName = Literal["gumbel", "ste", "gumbel_rao", "reinmax", "gumbel_legacy", "ste_legacy"]
EngineName = Literal["replay", "checkpointed", "unrolled"]


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        estimator: How tokens are relaxed.
        engine: How the gradient is computed.
    """

    estimator: Estimator
    engine: EngineName


METHODS: dict[str, Method] = {
    "gumbel": Method("gumbel", "replay"),
    "ste": Method("ste", "replay"),
    "gumbel_rao": Method("gumbel_rao", "replay"),
    "reinmax": Method("reinmax", "replay"),
    "gumbel_legacy": Method("gumbel", "unrolled"),
    "ste_legacy": Method("ste", "unrolled"),
}


def make_engine(
    name: EngineName, hops: int = 2, tolerance: float = 0.0, gradient_checkpointing: bool = False
) -> Engine:
    """The engine of that name.

    Args:
        name: replay, checkpointed or unrolled.
        hops: Feedback hops of `replay`.
        tolerance: Early stop of `replay`.
        gradient_checkpointing: Layer checkpointing of `replay`.

    Returns:
        The engine.
    """
    if name == "replay":
        return partial(replay, hops=hops, tolerance=tolerance, gradient_checkpointing=gradient_checkpointing)
    return {"checkpointed": checkpointed, "unrolled": unrolled}[name]
