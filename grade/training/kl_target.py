"""Beta by a controller, so that KL comes to a target: the same pressure for every method.

The multiplicative proportional controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2), on the KL that is
expected `STEPS_AHEAD` steps later instead of the last one. It must serve runs of tens of steps: a fresh adapter has a
KL of 0, which says nothing about beta, and once KL grows it grows fast, because the optimizer's steps are of one size.

- The prediction raises beta while KL is still on its way up, so it does not overshoot.
- Beta falls slower than it rises, so that a long way up from 0 does not leave it too small to brake with.
- Beta stays within a factor of `RANGE` of its start: a target that the run cannot reach does not drive it away.

Left out: a schedule of targets, and the integral term that a persistent offset would need (a factor on beta already
integrates the error).
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

GAIN = 0.25
NEAR = 4.0
FAR = 20.0
FALL, RISE = 0.5, 2.0
RANGE = 100.0
SLOPE_OVER = 3


class KLTarget:
    """``log beta += GAIN * clip(expected KL / target - 1, -FALL, RISE)`` after every step.

    The expected KL is ``kl + STEPS_AHEAD * slope``, at least 0, its slope taken over the last `SLOPE_OVER` steps.

    Args:
        target: KL in nats a completion, above 0.
        beta: Where beta starts, above 0.

    Attributes:
        beta: The current weight of KL, in reward per nat and token.
        recent: KL of the last steps, oldest first.
    """

    def __init__(self, target: float, beta: float) -> None:
        self.target, self.start, self.beta = target, beta, beta
        self.recent: list[float] = []
        self.climbing = True

    def update(self, kl: float) -> float:
        """Adjust beta to a step.

        Args:
            kl: The step's mean KL, in nats a completion.

        Returns:
            Beta of the next step.
        """
        self.recent = [*self.recent, kl][-1 - SLOPE_OVER :]
        now, before = math.sqrt(max(kl, 0.0)), math.sqrt(max(self.recent[0], 0.0))
        slope = (now - before) / max(1, len(self.recent) - 1)
        near, far = ((now + steps * slope) / math.sqrt(self.target) - 1 for steps in (NEAR, FAR))
        self.climbing = self.climbing and kl < self.target
        error = 0.0 if self.climbing and near < 0 < far else min(max(near, -FALL), RISE)
        self.beta = min(max(self.beta * math.exp(GAIN * error), self.start / RANGE), self.start * RANGE)
        return self.beta

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as plain numbers."""
        return {"beta": self.beta, "recent": self.recent}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.beta, self.recent = state["beta"], list(state["recent"])


class Targeting(Trainer):
    """The part of `grade.training.trainer.GradeTrainer` that changes beta between steps."""

    @cached_property
    def kl_target(self) -> KLTarget | None:
        """The controller of ``args.target_kl``."""
        return None if self.args.target_kl is None else KLTarget(self.args.target_kl, self.args.beta)

    def adjust_beta(self) -> None:
        """Give the controller the step's KL, over all microbatches and processes; called when its update is done."""
        kl, self.window.completion_kl = self.window.completion_kl, list[Tensor]()
        if self.kl_target is not None:
            # In double, as it was: the mean of two processes is then that of one to the last digits.
            self.window.note({"beta": torch.tensor(self.objective.beta, dtype=torch.float64)})
            self.set_beta(self.kl_target.update(self.together.mean(kl)))

    def set_beta(self, beta: float) -> None:
        """Weigh KL by beta from now on.

        Args:
            beta: In reward per nat and token.
        """
        self.objective = dataclasses.replace(self.objective, beta=beta)
        self.shared = dataclasses.replace(self.shared, beta=beta)
