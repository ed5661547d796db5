"""Three ways to one gradient.

Every engine draws its completions, computes ``L = mean_b(-R_b + beta KL_b)`` with ``KL_b`` the mean over the
completion's positions, and adds ``dL/dtheta`` to ``.grad`` of the adapter's parameters. They have one signature,
`Engine`, and agree: the same seed gives the same noise, tokens, loss and gradient.

- `replay` (default): sample on a cache, then one parallel pass and K-hop feedback;
- `stepwise.unrolled`: the original (`gumbel_legacy`, `ste_legacy`): re-run the prefix at each step and keep the graph;
- `stepwise.checkpointed`: the source document's optimised loop (Experiment 6), its KL put right.
"""

from grade.engines.base import Engine, GradientStep, Objective
from grade.engines.replay import replay
from grade.engines.stepwise import StepwiseOptions, checkpointed, unrolled

__all__ = ["Engine", "GradientStep", "Objective", "StepwiseOptions", "checkpointed", "replay", "unrolled"]
