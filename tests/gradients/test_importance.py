"""The gradient with importance weights against the enumerated one of the objective."""

import math
from itertools import product

import pytest
import torch
from conftest import gradient, perturb_adapter

# The enumerated policy of the policy gradients' own tests: 7 completions of at most 2 tokens, in float64.
from gradients.test_policy_gradient import enumerated, exact_gradient, learner, objective, policy

from grade.gradients.losses import importance_weights
from grade.gradients.policy_gradient import StepContext


def corrected(backbone, method, level, cap=math.inf):
    """Expected gradient over another policy's completions, and that policy's probabilities of each."""
    with torch.no_grad():
        every, probability, _, logps = enumerated(backbone)
        before = [p.clone() for p in backbone.trainable_parameters()]
        perturb_adapter(backbone, seed=5, scale=0.2)
        _, other, _, other_logps = enumerated(backbone)
        for p, value in zip(backbone.trainable_parameters(), before, strict=True):
            p.copy_(value)
    weights = importance_weights(logps.requires_grad_(), other_logps, every.mask, level, cap)
    assert level == "none" if weights is None else not weights.requires_grad  # constants of the update
    every = type(every)(every.prompts, every.ids, every.mask, weights)
    group = 2 if method in ("rloo", "grpo") else 1
    own, total = learner(backbone, method, num_generations=group), 0.0
    for rows in map(list, product(range(len(every.ids)), repeat=group)):
        own.means = [0.3] if method == "reinforce" else []
        backbone.zero_grad(set_to_none=True)
        own.step([every[rows]], objective(), StepContext(1, lambda: None))
        total = total + other[rows].prod() * gradient(backbone)
    return total, probability.detach() / other


@pytest.mark.parametrize("method", ["reinforce", "grpo"])  # a group's baseline has no weight; nor has a ratio's clip
def test_with_weights_of_whole_completions_another_policys_samples_give_the_objectives_gradient(method):
    """Unbiased: exactly, with nothing sampled, KL's part included. Float64, so assert_close's own tolerances."""
    backbone = policy()
    want = exact_gradient(backbone)
    found, ratio = corrected(backbone, method, "sequence")
    assert ratio.max() > 1.3 and ratio.min() < 0.8  # the other policy is another one
    torch.testing.assert_close(found, want)
    wrong_ones = [("none", 1.0), ("token", math.inf), ("sequence", 1.0)] if method == "reinforce" else []
    for level, cap in wrong_ones:  # biased, as the docstring says
        wrong, _ = corrected(backbone, method, level, cap)
        assert (wrong - want).norm() > 0.01 * want.norm(), level
