"""Engines by name."""

from functools import partial

from grade.gradients.methods import EngineName
from grade.gradients.objective import Engine
from grade.gradients.replay import replay
from grade.plugins import import_object

WITH_GRAPH = {
    "checkpointed": "grade.gradients.unrolled:checkpointed",
    "unrolled": "grade.gradients.unrolled:unrolled",
}
"""Engines that keep the graph of the rollout, or compute it again."""


def make_engine(name: EngineName, hops: int = 2, gradient_checkpointing: bool = False) -> Engine:
    """The engine of that name; the options are those of `replay` alone.

    All have the same signature and compute the same gradient: the same seed gives the same noise, tokens and loss.
    """
    if name == "replay":
        return partial(replay, hops=hops, gradient_checkpointing=gradient_checkpointing)
    return import_object(WITH_GRAPH[name])
