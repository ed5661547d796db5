"""The GRADE paper (arXiv 2601.11574): its published figures, and the arithmetic of its code, as coded and as meant.

Small and exact, so that one switch shows a defect. The code was read, not run; the arithmetic is this project's own.
Left out: what cannot be computed without the paper's runs, and what needs a model
(`grade.experiments.compare.measure.defects`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grade.gradients.losses import gae

# Table 1 of the paper: mean and standard deviation over the test samples, and how many there were (read in its code).
TEST_MEANS = {
    "gumbel": (0.5898, 0.3928),
    "ste": (0.7627, 0.3438),
    "ppo": (0.5104, 0.3127),
    "reinforce": (0.6173, 0.3779),
}
TEST_N = 500
FIRST_VALIDATION = (0.578, 0.610, 0.573, 0.520)  # after one update each: the nearest to an untrained policy it has
STEPS, BATCH, STATED_BATCH = 250, 2, 16


def _gae_over_batch(rewards: Tensor, values: Tensor, gamma: float = 0.99, gae_lambda: float = 0.95) -> Tensor:
    """Advantages [B, T] as the paper's code estimates them, backwards over rows, so over the batch.

    Row b bootstraps from row b + 1, another completion.

    >>> _gae_over_batch(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.full((2, 2), 0.5))
    tensor([[-0.4753,  0.5247],
            [-0.5000, -0.5000]])
    """
    advantages, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for b in reversed(range(len(rewards))):
        next_values = values[b + 1] if b + 1 < len(rewards) else torch.zeros_like(values[b])
        following = rewards[b] + gamma * next_values - values[b] + gamma * gae_lambda * following
        advantages[b] = following
    return advantages


def gae_example(over_batch: bool, tokens: int = 8) -> Tensor:
    """Advantages [T] of the first of two completions with rewards 1 and 0 at their last token and values 0.5."""
    rewards, values = torch.zeros(2, tokens), torch.full((2, tokens), 0.5)
    rewards[0, -1] = 1.0
    if over_batch:
        return _gae_over_batch(rewards, values)[0]
    return gae(rewards, values, torch.ones_like(rewards), 0.99, 0.95)[0][0]


def whitened(rewards: Sequence[float]) -> list[float]:
    """Advantages whitened over the batch, as the paper's REINFORCE: ``(r - mean) / std``, n - 1 in the denominator.

    >>> [round(a, 4) for a in whitened([0.9, 0.1])], [round(a, 4) for a in whitened([0.51, 0.50])]
    ([0.7071, -0.7071], [0.7071, -0.7071])
    >>> whitened([0.7])
    [nan]
    """
    n, mean = len(rewards), math.fsum(rewards) / len(rewards)
    if n == 1:
        return [math.nan]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / std for r in rewards]


def z_of_difference(a: str, b: str) -> float:
    """The z of two test means of the paper, from its standard deviations and the n that its code used.

    >>> round(z_of_difference("ste", "reinforce"), 1), round(z_of_difference("reinforce", "gumbel"), 1)
    (6.4, 1.1)
    """
    (mean_a, sd_a), (mean_b, sd_b) = TEST_MEANS[a], TEST_MEANS[b]
    return (mean_a - mean_b) / math.sqrt((sd_a**2 + sd_b**2) / TEST_N)


def first_above(values: Sequence[float], level: float, window: int = 1) -> int | None:
    """First step at which a moving average, of as many values as there are up to ``window``, reaches a level.

    >>> first_above([0.888, 0.2, 0.3], 0.8), first_above([0.2, 0.3, 0.9], 0.8, window=2) is None
    (0, True)
    """
    for i in range(len(values)):
        part = values[max(0, i + 1 - window) : i + 1]
        if math.fsum(part) / len(part) >= level:
            return i
    return None
