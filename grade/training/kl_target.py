"""Beta by a controller, so that KL comes to a target: the same pressure for every method.

The multiplicative proportional controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2), for runs of tens of
steps. There KL starts at 0, which says nothing about beta, and once it grows it grows fast, because the optimizer's
steps are of one size, and goes on growing for the memory of its momentum. Hence:

- The error is that of the distance ``sqrt(KL)``, as it will be `NEAR` steps later. The distance grows about evenly in
  steps of one size, KL with its square; and an error that is linear in it averages out when KL swings.
- Until KL first reaches its target, beta is not lowered as long as KL is on its way there: a long way up would leave it
  too small to brake with.
- Beta stays within a factor of `RANGE` of its start: a target that the run cannot reach does not drive it away.

Left out: a schedule of targets, and a start that is chosen by itself. A beta that starts ten times too small lets the
first steps overshoot, before the controller has seen anything.
"""

from __future__ import annotations

import math
from typing import Any

GAIN = 0.2
"""Change of log beta in a step at an error of 1."""
LARGEST = 1.0
"""Largest error that counts, both ways: what is cut off on one side only would bias the mean KL."""
NEAR = 10
"""Steps that the error looks ahead: the memory of AdamW's momentum, ``1 / (1 - 0.9)``."""
FAR = 40
"""Steps within which KL is on its way to the target."""
SLOPE_OVER = 3
"""Steps over which the slope is taken: KL of one step's completions is noisy."""
RANGE = 100.0
"""Beta stays within this factor of its start, both ways."""


class KLTarget:
    """``log beta += GAIN * clip((d + NEAR d') / sqrt(target) - 1, -LARGEST, LARGEST)`` after every step.

    ``d = sqrt(KL)`` is the distance from the reference and d' its slope over the last `SLOPE_OVER` steps. On the first
    way up a negative error counts as 0 if ``d + FAR d'`` is beyond the target.

    Attributes:
        target: KL in nats per completion, above 0.
        start: Where beta starts, above 0.
        beta: The current weight of KL, in reward per nat and token.
        recent: Distances of the last steps, oldest first.
        climbing: Whether KL has not reached its target yet.
    """

    def __init__(self, target: float, beta: float) -> None:
        self.target, self.start, self.beta = target, beta, beta
        self.recent: list[float] = []
        self.climbing = True

    def update(self, kl: float) -> float:
        """Beta of the next step, after one whose mean KL is ``kl`` nats per completion."""
        distance = math.sqrt(max(kl, 0.0))  # an estimate from the sampled tokens, or rounding, can be below 0
        self.recent = [*self.recent, distance][-1 - SLOPE_OVER :]
        self.climbing = self.climbing and kl < self.target
        slope = (distance - self.recent[0]) / max(1, len(self.recent) - 1)
        near, far = ((distance + steps * slope) / math.sqrt(self.target) - 1 for steps in (NEAR, FAR))
        error = 0.0 if self.climbing and near < 0 < far else min(max(near, -LARGEST), LARGEST)
        beta = self.beta * math.exp(GAIN * error)
        self.beta = min(max(beta, self.start / RANGE), self.start * RANGE)
        return self.beta

    def state(self) -> dict[str, Any]:
        """Plain values for `restore`."""
        return {"beta": self.beta, "recent": self.recent, "climbing": self.climbing}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.beta, self.recent, self.climbing = state["beta"], list(state["recent"]), state["climbing"]
