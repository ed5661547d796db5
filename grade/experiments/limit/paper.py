"""The GRADE paper (arXiv 2601.11574): its published figures, and the arithmetic of its code, as coded and as meant.

Small and exact, so that one switch shows a defect. The code was read, not run; the arithmetic is this project's own.
Left out: what cannot be computed without the paper's runs, and what needs a model
(`grade.experiments.limit.defects`).
"""

import math
import statistics
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
STEPS, BATCH = 250, 2


def gae_example(over_batch: bool) -> Tensor:
    """Advantages [8] of the first of two completions with rewards 1 and 0 at their last token and values 0.5.

    The paper's code runs backwards over rows, so over the batch: row b bootstraps from row b + 1, another completion.
    """
    rewards, values = torch.zeros(2, 8), torch.full((2, 8), 0.5)
    rewards[0, -1] = 1.0
    if over_batch:
        return gae(rewards.T, values.T, torch.ones_like(values.T), 0.99, 0.95)[0][:, 0]
    return gae(rewards, values, torch.ones_like(values), 0.99, 0.95)[0][0]


def whitened(rewards: Sequence[float]) -> float:
    """The first of a batch's rewards whitened over it, as the paper's REINFORCE: ``(r - mean) / std``, n - 1 below.

    >>> round(whitened([0.9, 0.1]), 4), round(whitened([0.51, 0.50]), 4)
    (0.7071, 0.7071)
    """
    return (rewards[0] - statistics.fmean(rewards)) / statistics.stdev(rewards)


def z_of_difference(a: str, b: str) -> float:
    """The z of two test means of the paper, from its standard deviations and the n that its code used.

    >>> round(z_of_difference("ste", "reinforce"), 1), round(z_of_difference("reinforce", "gumbel"), 1)
    (6.4, 1.1)
    """
    (mean_a, sd_a), (mean_b, sd_b) = TEST_MEANS[a], TEST_MEANS[b]
    return (mean_a - mean_b) / math.hypot(sd_a, sd_b) * math.sqrt(TEST_N)
