"""Three engines that compute the same gradient, by name.

Every engine samples completions, computes ``L = mean_b(-R_b + beta KL_b)`` with ``KL_b`` the mean over the
completion's positions, and adds ``dL/dtheta`` to ``.grad`` of the adapter's parameters. All have the signature
`grade.gradients.objective.Engine`, and they agree: the same seed gives the same noise, tokens, loss and gradient.

- `replay` (default): samples on a cache, then makes one parallel pass with K-hop feedback;
- `unrolled`: the original (`gumbel_legacy`, `ste_legacy`): re-runs the prefix at each step and keeps the graph;
- `checkpointed`: the source document's optimised loop (Experiment 6), with its KL fixed.
"""

from __future__ import annotations

from functools import partial

from grade.gradients.methods import EngineName
from grade.gradients.objective import Engine
from grade.gradients.replay import replay
from grade.gradients.unrolled import checkpointed, unrolled


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
