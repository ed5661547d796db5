"""Where arithmetic ends: rewards that do not differ, that are missing, and fits that cannot be made."""

from itertools import product

import pytest
import torch
from conftest import ToyReward, make_backbone, make_prompts, tiny_config
from gradients.test_policy_gradient import policy as tiny_policy

from grade.errors import InputError
from grade.experiments.enumeration import every_completion
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.distilled.ridge import Choice
from grade.gradients.distilled.store import Fit
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import Completions, PolicyGradient, StepContext
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import completion_logps
from grade.rewards.base import Reward
from grade.rewards.rewards import Scores
from grade.training.toy import toy_task

GROUP, LENGTH = 6, 5
METHODS = {
    "rloo": {}, "grpo": dict(scale_rewards="group"), "ppo": {}, "distilled": {}, "reinforce": {},
}  # fmt: skip


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
    return (DistilledGradient if method == "distilled" else PolicyGradient)(config, backbone)


def take(own, values, seed=0, prompts=3, beta=0.0):
    own.backbone.zero_grad(set_to_none=True)
    batch = make_prompts(prompts, seed=seed), torch.Generator().manual_seed(seed)
    own.step([batch], Objective(Given(values), beta), StepContext(1, lambda: None))
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own.backbone.trainable_parameters()]
    return flatten(grads)


@pytest.mark.filterwarnings("ignore:the reward is equal")
@pytest.mark.parametrize("method", ["rloo", "grpo", "ppo", "distilled", "remax"])
@pytest.mark.parametrize("level", [0.0, 0.1, 3333333.3])
def test_rewards_that_differ_by_rounding_move_nothing(policy, method, level):
    own, level = learner(policy, method), torch.tensor(level, dtype=torch.float32)
    for seed in range(3):
        found = take(own, lambda ids, mask: level + level * 2**-23 * (torch.arange(len(ids)) % 3 == 0), seed)
        assert not found.any()
    assert take(own, lambda ids, mask: level + mask.sum(1)).norm() > 1e-3, "others do"


@pytest.mark.filterwarnings("ignore:the reward is equal")
@pytest.mark.parametrize("method", ["rloo", "ppo", "distilled"])
def test_where_no_reward_is_better_an_untrained_policy_keeps_to_its_reference(method):
    """Exactly, with KL and in float32: AdamW would make steps of a gradient of rounding."""
    own = learner(toy_task().backbone, method)
    for seed in range(2):
        assert not take(own, lambda ids, mask: torch.full((len(ids),), 0.1), seed, beta=0.1).any()


def test_ppo_learns_from_a_single_completion_whose_reward_nothing_is_compared_with():
    own = learner(toy_task().backbone, "ppo", num_generations=1, whiten_advantages=True)
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
    batch = learner(policy, "ppo").sample(make_prompts(3), torch.Generator().manual_seed(0))
    scored, found = torch.arange(3 * GROUP) % 3 > 0, []
    for each, given in ((batch, scored), (batch[scored], scored[scored])):
        policy.zero_grad(set_to_none=True)
        reward = Given(lambda ids, mask, given=given: torch.where(given, mask.sum(1).double(), torch.nan))
        learner(policy, "ppo").step([each], Objective(reward, 0.0), StepContext(1, lambda: None))
        found.append(flatten(p.grad for p in policy.trainable_parameters()))
    assert found[0].norm() > 1e-3
    torch.testing.assert_close(found[0], 2 / 3 * found[1])


@pytest.mark.parametrize("family", ["counts", "bag"])
def test_features_that_do_not_differ_leave_the_step_to_rloo(policy, family):
    """A noisy judge of equal completions."""
    own, batch = learner(policy, "distilled", distil_families=[family], residual_weight=1.0), make_prompts(3)
    ids = torch.arange(3 * LENGTH).view(3, LENGTH).repeat_interleave(GROUP, 0) % 5 + 13
    completions = Completions(batch.repeat(GROUP), ids, torch.ones_like(ids))
    for seed in range(3):
        noise, found = Given(lambda *_, seed=seed: torch.randn(18, generator=torch.Generator().manual_seed(seed))), []
        for each in (own, learner(policy, "rloo")):
            policy.zero_grad(set_to_none=True)
            each.step([completions], Objective(noise, 0.0), StepContext(1, lambda: None))
            found.append(flatten(p.grad for p in policy.trainable_parameters()))
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("method", ["rloo", "ppo", "distilled"])
def test_a_reward_that_is_not_finite_updates_nothing(policy, method):
    class Broken(ToyReward):
        def forward(self, embeds, mask):
            return super().forward(embeds, mask) * torch.nan

    own, batch = learner(policy, method), (make_prompts(), torch.Generator().manual_seed(0))
    policy.zero_grad(set_to_none=True)
    with pytest.raises(InputError, match="reward: got .*nan.*; allowed: finite numbers; nothing was updated"):
        own.step([batch], Objective(Broken(16)), StepContext(1, pytest.fail))
    assert all(p.grad is None for p in policy.trainable_parameters())
    assert method != "distilled" or len(own.store) == 0


@pytest.mark.parametrize("vocab", [300, 5000, 50_000])
@pytest.mark.parametrize("seed", range(4))
def test_a_sparse_verifier_does_not_make_gradients_explode(vocab, seed):
    """One right answer now and then, in completions that hardly share a token."""
    config = tiny_config(vocab_size=vocab)
    own = learner(make_backbone(config, seed=seed, perturb=False), "distilled", residual_weight="auto")
    norms, generator = [], torch.Generator().manual_seed(seed)
    for step in range(4):
        right = int(torch.randint(3 * GROUP, (), generator=generator))
        found = take(own, lambda ids, mask, right=right: (torch.arange(len(ids)) == right).double(), 10 * seed + step)
        norms.append(float(found.norm()))
    assert max(norms) < 100


@pytest.mark.parametrize("prior", [False, True])
def test_residual_weight_1_is_unbiased(prior):
    """Enumerated: every pair of completions by its probability, after 18 completions, with a refit on the pair."""
    backbone, length = tiny_policy(), 2
    ids, mask = every_completion(3, length, backbone.eos_token_ids)
    prompts = PromptBatch(torch.tensor([[0, 2, 0]]), torch.ones(1, 3, dtype=torch.long))
    every = Completions(prompts.repeat(len(ids)), ids, mask)
    goal = Objective(ToyReward(16), 0.0)
    own = learner(backbone, "distilled", num_generations=2, max_completion_length=length, residual_weight=1.0)
    if prior:  # of texts that know half of the reward, and something else
        worth = goal.score(backbone, every.prompts, ids, mask)
        values = torch.stack([worth[(ids == token).any(1)].mean() for token in range(3)])
        own.prior = Fit(
            "counts", 0.5 * values.unsqueeze(0) + torch.tensor([[0.1, 0.0, -0.1]]), Choice(1.0, 0.3, 1.0, 0.1)
        )
    context = StepContext(1, lambda: None)

    def step(rows):
        backbone.zero_grad(set_to_none=True)
        own.step([every[rows]], goal, context)
        return flatten(p.grad for p in backbone.trainable_parameters())

    order = torch.randint(len(ids), (18,), generator=torch.Generator().manual_seed(1)).tolist()
    step(order)
    assert own.fit.choice.slope > 0
    before = {name: value.clone() for name, value in own.tensors().items()}
    logps = completion_logps(backbone, every.prompts, ids, mask).sum(1)
    rewards = goal.score(backbone, every.prompts, ids, mask)
    truth = flatten(torch.autograd.grad(-(logps.exp() * rewards).sum(), backbone.trainable_parameters()))
    probabilities, mean = logps.exp().detach(), torch.zeros_like(truth)
    for pair in map(list, product(range(len(ids)), repeat=2)):
        own.load_tensors({name: value.clone() for name, value in before.items()})
        mean += probabilities[pair].prod() * step(pair)
        assert own.fit.predates and own.fit.weights.shape[0] == 2, "refitted on the pair"
        assert not prior or own.store.prior_weight > 0.1
    assert (mean - truth).norm() <= 1e-12 * truth.norm()
