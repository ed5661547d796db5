"""A budget for KL: the policy's distance from the reference follows a schedule, whatever the method and its rate.

After each step the change of the adapter, ``theta + c (theta' - theta)``, is scaled so that KL(policy || reference)
lands on the schedule (a line search, as in Schulman et al. 2015, arXiv:1502.05477, on the distance from the reference
instead of that from the last policy). The distance sqrt(KL) grows by the same amount in every step:
``B_s = target (s / S)^2`` for a policy that starts at the reference. Direction and moments are the optimizer's own.

KL of one batch is about as noisy as the schedule's increments are large, so the policy's KL is a running estimate: it
grows as the step's completions say, and is averaged with what the next step's measure. The line search asks for growth
too: KL of the *same* completions before and after. After the last step the adapter is scaled to the target once more,
along `LANDING` completions drawn for that.

A run that ends early, after step s, has the KL of ``B_s``. A policy beyond its budget stays where it is (c = 0), or
goes to where KL is lowest on the line, until the schedule has caught up. One that is `FAR` beyond it is drawn back
instead, towards the reference: the step's completions then have prefixes that it leaves, and along them KL falls while
it grows elsewhere. One that is too slow even with `LONGEST` steps, or whose steps lower KL, stays below.

Methods with several updates within a step (``passes_per_step``) make them all, and the change of the whole step is
scaled. Left out: landing each update. A step can be `LONGEST` times its length instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from grade.gradients.methods import MethodConfig
from grade.models.backbone import Backbone
from grade.models.parameters import restoring, set_values
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import hidden_scores, predicting_hidden

LONGEST = 4.0
"""Largest c: beyond it a step says little about the direction."""
EVALUATIONS = 5
"""Most measurements of KL in a line search, which takes two or three as a rule."""
SAME = 1e-3
"""Relative difference of two c that are not worth another measurement."""
TOLERANCE, LAST_TOLERANCE = 0.05, 0.01
"""Relative errors at which a line search ends. In a step it is well below the noise of a batch, and the next step makes
up for it; after the last step nothing does."""
LARGEST_LOG_RATIO = 3.0
"""Importance ratios are cut off there, both ways; where a step lands they are mostly far smaller."""
FAR = 2.0
"""Times the budget, from which on a policy is drawn back. Noise of batches of 32 completions stays below 1.5."""
LANDING = 128
"""Completions on which the last step lands on the target."""


class KLBudget:
    """Which KL a step may use: a schedule, and a running estimate of the policy's KL, in nats per completion."""

    def __init__(self, target: float, steps: int) -> None:
        self.target, self.steps = target, steps  # KL after the last step; S
        self.start: float | None = None  # KL before the first step
        self.kl = 0.0  # the estimate for the current policy
        self.scale = 1.0  # c of the last step that moved, the first guess of the next

    def after(self, step: int) -> float:
        """B_s, the budget after step s = 1 to S.

        >>> budget = KLBudget(10.0, 20)
        >>> round(budget.after(10), 9), round(budget.after(20), 9)
        (2.5, 10.0)
        """
        start = math.sqrt(self.start or 0.0)
        return (start + (math.sqrt(self.target) - start) * min(step / self.steps, 1.0)) ** 2

    def wanted(self, step: int, measured: float) -> float:
        """KL that the completions of step s should have after it, from what they measure before it.

        They are to grow as the policy should: their own level is noise, and only counts where KL is 0.
        """
        if self.start is None:
            self.start = self.kl = measured
        else:
            self.kl = (self.kl + measured) / 2
        budget = self.after(step)
        return measured * budget / self.kl if min(measured, self.kl) > 0 else budget

    def exceeded(self, step: int) -> bool:
        """Whether the policy, before step s, is `FAR` beyond the budget after it."""
        return self.kl > FAR * self.after(step)

    def landed(self, before: float, after: float) -> None:
        """A step took its completions from one KL to another."""
        self.kl = self.kl * after / before if before > 0 else after

    def state(self) -> dict[str, Any]:
        """Plain values for `restore`."""
        return {"start": self.start, "kl": self.kl, "scale": self.scale}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.start, self.kl, self.scale = state["start"], state["kl"], state["scale"]


class KLSteering:
    """Scales each step of a run so that KL follows its budget, and the last one to the target."""

    landing = LANDING

    def __init__(self, backbone: Backbone, config: MethodConfig, total: Callable[[Tensor], Tensor]) -> None:
        self.backbone, self.config, self.total = backbone, config, total
        self.budget = KLBudget(config.target_kl, config.max_steps)

    def before_step(self) -> None:
        """Remember the policy at the step's start; its completions are added to none."""
        self.before = [p.detach().clone() for p in self.backbone.trainable_parameters()]
        self.completions: list[tuple[PromptBatch, Tensor, Tensor]] = []

    def add(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> None:
        """Add a microbatch of the step's completions, half of which measure KL."""
        half = slice(None, None, 2)
        self.completions.append((prompts[half], ids[half], mask[half]))

    def after_update(self, step: int, direction: Tensor | None = None) -> dict[str, Tensor]:
        """Scale the change of step s = 1 to S; figures for the log.

        With a ``direction`` [V] the step sets the token bias: along it, as long as the budget allows.
        """
        policy, budget = self.backbone.trainable_parameters(), self.budget
        least, most = self.config.min_completion_length, self.config.max_completion_length
        with restoring(policy):
            set_values(policy, self.before)
            batch = BatchKL(self.backbone, self.completions, least, most, self.total)
        wanted = budget.wanted(step, batch.start)
        if direction is not None:
            scale, landed = set_length(self.backbone, batch, direction, wanted, TOLERANCE)
        elif budget.exceeded(step):  # the step is not taken, and the next one begins with its own length
            set_values(policy, self.before)
            landed = scale_adapter(self.backbone, batch, budget.after(step) / budget.kl, TOLERANCE)
            scale, budget.scale = 0.0, 1.0
        else:
            scale, landed = scale_step(policy, self.before, batch.start, wanted, batch.measure, budget.scale)
            budget.scale = scale or budget.scale
        budget.landed(batch.start, landed)
        # In double, as KL is: the mean of two processes is then that of one to the last digits.
        figures = {"kl_budget": budget.after(step), "kl_scale": scale}
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}

    def land(self, prompts: PromptBatch, generator: torch.Generator, direction: Tensor | None = None) -> None:
        """Scale the adapter, or the token bias along its direction, to the target, on completions of these prompts."""
        least, most = self.config.min_completion_length, self.config.max_completion_length
        ids, mask = generate(self.backbone, prompts, most, generator, min_new_tokens=least)
        batch = BatchKL(self.backbone, [(prompts, ids, mask)], least)
        if direction is not None:
            set_length(self.backbone, batch, direction, self.config.target_kl, LAST_TOLERANCE)
            return
        scale_adapter(self.backbone, batch, self.config.target_kl / max(batch.start, 1e-12), LAST_TOLERANCE)


def scale_adapter(backbone: Backbone, batch: BatchKL, growth: float, tolerance: float) -> float:
    """Scale the change of what is trained, so that KL of a batch of completions is ``growth`` times what it was.

    That is the adapter's change since the reference and, if it is trained, the token bias's; a token bias that is not
    trained has KL of its own there. Returns KL.
    """
    policy, bias, reference = backbone.trainable_parameters(), backbone.token_bias, backbone.reference_values()
    wanted, first, nearest = growth * batch.start, min(growth**0.5, 1.5), 0.0
    if bias is not None and not bias.requires_grad:
        with restoring(policy):
            set_values(policy, reference)
            nearest = batch.measure()
    return scale_step(policy, reference, nearest, wanted, batch.measure, first, tolerance)[1]


@torch.no_grad()
def set_length(
    backbone: Backbone, batch: BatchKL, direction: Tensor, wanted: float, tolerance: float
) -> tuple[float, float]:  # fmt: skip
    """Set the token bias along a direction [V], at the length that gives a batch the KL wanted; its factor, and KL.

    It starts from the reference's bias. The first length has the KL of small changes, ``sum_t Var(b(y_t)) / 2``, with
    the variance over the batch's tokens.
    """
    bias = backbone.token_bias
    tokens = torch.cat([direction[ids[mask.bool()]] for _, ids, mask in batch.completions])
    spread = float(tokens.std()) if len(tokens) > 1 else 0.0
    if not spread > 0:
        return 0.0, batch.start
    length = math.sqrt(2 * wanted * sum(len(ids) for _, ids, _ in batch.completions) / len(tokens)) / spread
    zero, measure = backbone.reference_bias(), partial(batch.measure, same_adapter=True)
    bias.copy_(zero)
    start = measure()  # of the adapter
    bias.copy_(zero + direction * length)
    factor, kl = scale_step([bias], [zero], start, wanted, measure, tolerance=tolerance)
    return factor * length, kl


@torch.no_grad()
def scale_step(
    parameters: Sequence[Tensor], before: Sequence[Tensor], start: float, wanted: float,
    measure: Callable[[], float], first: float = 1.0, tolerance: float = TOLERANCE,
) -> tuple[float, float]:  # fmt: skip
    """Move parameters to ``before + c (parameters - before)``, in place, with the KL that is wanted.

    ``start`` is KL at ``before``; ``measure`` gives that at the parameters' current values. ``first`` is the first c
    that is tried; the search ends at a relative error of ``tolerance``. If more KL is wanted and it falls along the
    line, the step is taken as it is (c = 1). Returns c in [0, `LONGEST`] and KL there.
    """
    change = [p - b for p, b in zip(parameters, before, strict=True)]
    points, scale = {0.0: start}, first
    for _ in range(EVALUATIONS):
        if any(abs(scale - c) <= SAME * max(c, scale) for c in points):
            break
        set_values(parameters, [b + scale * d for b, d in zip(before, change, strict=True)])
        kl = measure()
        if not math.isfinite(kl):  # logits overflow so far away
            scale /= 8
            continue
        points[scale] = kl
        if abs(kl - wanted) <= tolerance * wanted:
            return scale, kl
        scale = _next(points, wanted)
    scale = min(points, key=lambda c: abs(points[c] - wanted))
    scale = 1.0 if scale == 0 and wanted > start else scale
    set_values(parameters, [b + scale * d for b, d in zip(before, change, strict=True)])
    return scale, points[scale] if scale in points else measure()


def _next(points: dict[float, float], wanted: float) -> float:
    """Where on the line KL should be as wanted.

    From two points by a straight line through sqrt(KL), from more by a parabola through KL at 0 and the two nearest
    ones. Of its two solutions that at which KL rises; without one the nearest to it.

    >>> _next({0.0: 0.0, 1.0: 4.0}, 1.0), round(_next({0.0: 1.0, 1.0: 2.0, 2.0: 5.0}, 10.0), 9)
    (0.5, 3.0)
    """
    near = sorted((c for c in points if c), key=lambda c: abs(points[c] - wanted))[:2]
    kl = points[0.0]
    if len(near) == 1:
        (c,) = near
        slope = (math.sqrt(points[c]) - math.sqrt(kl)) / c
        missing = math.sqrt(wanted) - math.sqrt(kl)
        if slope * missing > 0:
            return min(missing / slope, LONGEST)
        return LONGEST if missing > 0 else c / 2  # KL fell and should rise, or it may have a minimum before c
    curve = np.polynomial.Polynomial.fit([0.0, *near], [kl, *(points[c] for c in near)], 2)
    tried = [0.0, LONGEST, *(float(c.real) for c in (*(curve - wanted).roots(), *curve.deriv().roots())
                             if abs(c.imag) < 1e-9 and 0 < c.real < LONGEST)]  # fmt: skip
    best = min(abs(curve(c) - wanted) for c in tried)
    return max((c for c in tried if abs(curve(c) - wanted) <= best + 1e-9 * wanted), key=curve.deriv())


class BatchKL:
    """KL of a policy along given completions, while the policy moves away from the one that sampled them.

    ``sum_t E[w_<t KL_t]`` with the exact KL at each position and the importance ratio w of its prefix, normalised over
    the batch: a policy that makes new prefixes likelier is measured there. ``start`` is KL under the one that sampled.
    """

    def __init__(
        self, backbone: Backbone, completions: Sequence[tuple[PromptBatch, Tensor, Tensor]], least: int = 0,
        length: int | None = None, total: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:  # fmt: skip
        """Measure the policy that sampled, along prompts, ids and mask [B, T] of each microbatch.

        ``least``: tokens before which no end of sequence was sampled; ``length``: T, the same on all processes (None:
        the longest here); ``total`` sums a tensor over processes.
        """
        self.backbone, self.completions, self.least, self.total = backbone, completions, least, total
        self.length = length or max(ids.shape[1] for _, ids, _ in completions)
        with backbone.reference():
            self.reference = self._hidden()
        self.hidden = self._hidden()
        each, self.logps = self._terms(self.hidden)
        self.start = self._mean(each, torch.ones_like(each))

    def measure(self, same_adapter: bool = False) -> float:
        """KL under the current policy; ``same_adapter``: only the token bias has changed, so no pass is needed."""
        each, logps = self._terms(self.hidden if same_adapter else self._hidden())
        ratio = logps - self.logps
        prefix = (ratio.cumsum(1) - ratio).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        return self._mean(each, prefix.exp())

    @torch.no_grad()
    def _hidden(self) -> list[Tensor]:
        return [predicting_hidden(self.backbone, prompts, ids) for prompts, ids, _ in self.completions]

    @torch.no_grad()
    def _terms(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """KL and log-probability of each token of this process [n, T], 0 where masked, from hidden states."""
        kl, logps = [], []
        for (_, ids, mask), hidden, reference in zip(self.completions, states, self.reference, strict=True):
            missing = (0, self.length - ids.shape[1])
            chosen, whole, _ = hidden_scores(self.backbone, hidden, reference, ids, mask, self.least)
            kl.append(F.pad(whole.double(), missing))
            logps.append(F.pad(chosen.double(), missing))
        return torch.cat(kl), torch.cat(logps)

    def _mean(self, values: Tensor, weights: Tensor) -> float:
        """``sum_t`` of the weighted means of values [n, T]."""
        weighted, total = self.total(torch.stack([(weights * values).sum(0), weights.sum(0)]))
        return max(float((weighted / total).sum()), 0.0)  # rounding may leave less; NaN stays
