"""ppo's values in closed form: ridge regression against NumPy, over steps and processes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ToyReward, flat_grad, gradient

from grade.errors import InputError
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import CLOSED_FORM_PENALTY, ClosedFormValues, PolicyGradient, StepContext
from grade.models.prompts import PromptBatch
from grade.models.scoring import completion_logps, predicting_hidden


def batch(seed, rows=6, length=4):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, 16, generator=generator, dtype=torch.float64)
    mask = (torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)).long()
    return hidden, torch.randn(rows, generator=generator, dtype=torch.float64), mask


def test_the_fit_is_ridge_regression_on_all_tokens_so_far_with_a_free_mean(policy):
    head, parts = ClosedFormValues(policy), [batch(seed) for seed in (0, 1)]
    for hidden, returns, mask in parts:
        head.add(hidden, returns, mask, lambda x: x)
    head.solve()
    x = np.concatenate([F.layer_norm(h, (16,))[m.bool()].numpy() for h, _, m in parts])
    y = np.concatenate([r.unsqueeze(1).expand(m.shape)[m.bool()].numpy() for _, r, m in parts])
    # A free mean is the same as centring; rows of sqrt(penalty) make least squares into ridge regression.
    penalty = np.sqrt(CLOSED_FORM_PENALTY * len(x)) * np.eye(16)
    weights = np.linalg.lstsq(np.concatenate([x - x.mean(0), penalty]), np.concatenate([y - y.mean(), np.zeros(16)]))[0]
    want = y.mean() + (x - x.mean(0)) @ weights
    got = torch.cat([head(h)[m.bool()] for h, _, m in parts])
    # float64 on both sides; the normal equations square the condition number, which is about 1e2 here
    assert torch.allclose(got, torch.from_numpy(want), atol=1e-10)


def test_two_processes_give_the_fit_of_one(policy):
    one, two = ClosedFormValues(policy), ClosedFormValues(policy)
    one.add(*batch(0), lambda x: x)
    one.add(*batch(0), lambda x: x)
    two.add(*batch(0), lambda x: 2 * x)
    one.solve(), two.solve()
    assert torch.allclose(one.linear.weight, two.linear.weight, atol=1e-12)


def test_a_step_uses_the_fit_of_the_steps_before_and_trains_no_head(policy):
    config = MethodConfig(method="ppo", value_fit="closed_form", max_completion_length=3, num_generations=1)
    learner = PolicyGradient(config, policy)
    prompts = PromptBatch(torch.tensor([[2, 3], [4, 5], [6, 7]]), torch.ones(3, 2, dtype=torch.long))
    assert learner.parameters() == []
    for step in range(2):
        before = learner.value_head.linear.bias.clone()
        pairs = [(prompts, torch.Generator().manual_seed(step))]
        learner.step(pairs, Objective(ToyReward(16), 0.1), StepContext(1, lambda: None))
        assert not torch.equal(learner.value_head.linear.bias, before)
    tokens = learner.value_head.tokens
    other = PolicyGradient(config, policy)
    other.load_tensors(learner.tensors())
    assert tokens > 0 and torch.equal(other.value_head.products, learner.value_head.products)


def test_values_are_of_the_frozen_bases_states(policy):
    """In the second step, with lambda and gamma of 1, a token's advantage is the reward less V of the base's state."""
    config = MethodConfig(method="ppo", value_fit="closed_form", max_completion_length=3, num_generations=1,
                          passes_per_step=1, whiten_advantages=False, gae_lambda=1.0)  # fmt: skip
    learner, objective = PolicyGradient(config, policy), Objective(ToyReward(16), 0.0)
    prompts = PromptBatch(torch.tensor([[2, 3], [4, 5], [6, 7]]), torch.ones(3, 2, dtype=torch.long))
    first, second = (learner.sample(prompts, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    learner.step([first], objective, StepContext(1, lambda: None))
    with policy.reference(), torch.no_grad():
        values = learner.value_head(predicting_hidden(policy, *second.text[:2]))
    policy.zero_grad(set_to_none=True)
    (step,) = learner.step([second], objective, StepContext(1, lambda: None))
    logps = completion_logps(policy, *second.text)
    want = flat_grad(-((step.reward.unsqueeze(1) - values) * logps).sum(1).mean(), policy)
    torch.testing.assert_close(gradient(policy), want)


def test_it_needs_the_reference_pass():
    with pytest.raises(InputError, match=r"kl_estimator: got 'k3'; allowed: exact with value_fit = closed_form"):
        MethodConfig(method="ppo", value_fit="closed_form", kl_estimator="k3")
    for name in ("value_learning_rate", "value_clip"):
        with pytest.raises(InputError, match=f"{name}: got 0.5; allowed: .* with value_fit = closed_form"):
            MethodConfig(method="ppo", value_fit="closed_form", **{name: 0.5})
