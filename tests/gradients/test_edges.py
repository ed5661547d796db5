"""Where arithmetic ends: rewards that do not differ, and that are missing."""

import pytest
import torch
from conftest import make_prompts

from grade.gradients.learner import StepContext
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.models.parameters import flatten
from grade.rewards.base import Reward
from grade.rewards.rewards import Scores
from grade.training.toy import toy_task

GROUP, LENGTH = 6, 5
METHODS = {"rloo": {}, "grpo": dict(scale_rewards="group"), "ppo": {}, "reinforce": {}}


class Given(Reward):
    """What a function gives for each completion; NaN is None."""

    def __init__(self, values):
        self.values = values

    def score(self, policy, prompts, ids, mask):
        values = self.values(ids, mask)
        self.last = Scores({"given": values})
        return values.nan_to_num(0.0)


def learner(backbone, method, **options):
    values = dict(method=method, max_completion_length=LENGTH, num_generations=1 if method == "reinforce" else GROUP)
    config = MethodConfig(**values | METHODS.get(method, {}) | options)
    return PolicyGradient(config, backbone)


def take(own, values, seed=0, prompts=3, beta=0.0):
    own.backbone.zero_grad(set_to_none=True)
    batch = make_prompts(prompts, seed=seed).repeat(own.config.group), torch.Generator().manual_seed(seed)
    own.step([batch], Objective(Given(values), beta), StepContext(1, lambda: None))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own.backbone.trainable_parameters()]
    return flatten(grads)


@pytest.mark.filterwarnings("ignore:the reward is equal")
@pytest.mark.parametrize("method", ["rloo", "grpo", "ppo", "remax"])
@pytest.mark.parametrize("level", [0.0, 0.1, 3333333.3])
def test_rewards_that_differ_by_rounding_move_nothing(policy, method, level):
    own, level = learner(policy, method), torch.tensor(level, dtype=torch.float32)
    for seed in range(3):
        found = take(own, lambda ids, mask: level + level * 2**-23 * (torch.arange(len(ids)) % 3 == 0), seed)
        assert not found.any()
    found = take(own, lambda ids, mask: level + (1 + level) * (torch.arange(len(ids)) % 3 == 0))
    assert found.norm() > 1e-3, "others do"


@pytest.mark.filterwarnings("ignore:the reward is equal")
@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_where_no_reward_is_better_an_untrained_policy_keeps_to_its_reference(method):
    """Exactly, with KL and in float32: AdamW would make steps of a gradient of rounding."""
    own = learner(toy_task().backbone, method)
    for seed in range(2):
        assert not take(own, lambda ids, mask: torch.full((len(ids),), 0.1), seed, beta=0.1).any()


def test_ppo_learns_from_a_single_completion_whose_reward_nothing_is_compared_with():
    own = learner(toy_task().backbone, "ppo", num_generations=1)
    assert take(own, lambda ids, mask: mask.sum(1).float(), prompts=1).norm() > 1e-3


@pytest.mark.filterwarnings("ignore:the reward is equal")
@pytest.mark.parametrize("method", METHODS)
def test_a_completion_that_nothing_scored_has_no_part_in_the_step(policy, method):
    """The gradient does not depend on its tokens' probability, and all of a step may be so."""
    assert not take(learner(policy, method), lambda ids, mask: torch.full((len(ids),), torch.nan)).any()
    if method == "reinforce":
        return
    one = torch.arange(3 * GROUP) % GROUP == 0
    found = take(learner(policy, method), lambda ids, mask: torch.where(one, torch.nan, 3.0))
    assert not found.any(), "as a reward of 0 it would be the worst"


def test_ppo_whitens_over_the_completions_that_were_scored(policy):
    """A step with others gives what the scored two thirds give alone, as a mean over all that were sampled."""
    batch = learner(policy, "ppo").sample(make_prompts(3).repeat(GROUP), torch.Generator().manual_seed(0))
    scored, found = torch.arange(3 * GROUP) % 3 > 0, []
    for each, given in ((batch, scored), (batch[scored], scored[scored])):
        policy.zero_grad(set_to_none=True)
        reward = Given(lambda ids, mask, given=given: torch.where(given, mask.sum(1).double(), torch.nan))
        learner(policy, "ppo").step([each], Objective(reward, 0.0), StepContext(1, lambda: None))
        found.append(flatten(p.grad for p in policy.trainable_parameters()))
    assert found[0].norm() > 1e-3
    torch.testing.assert_close(found[0], 2 / 3 * found[1])
