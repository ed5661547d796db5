"""Policy-gradient losses against hand arithmetic, in float64."""

import math

import pytest
import torch

from grade.errors import InputError
from grade.gradients import losses


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_group_relative_advantages_with_and_without_the_standard_deviation():
    returns = t([1, 2, 6], [0, 0, 0])
    # mean 3: (-2, -1, 3) times 3 / 2
    torch.testing.assert_close(losses.grpo(returns), t([-3, -1.5, 4.5], [0, 0, 0]))
    # std = sqrt((4 + 1 + 9) / 2) = sqrt(7); equal returns give 0, not NaN
    std = math.sqrt(7) + losses.STD_EPSILON
    torch.testing.assert_close(losses.grpo(returns, True), t([-2 / std, -1 / std, 3 / std], [0, 0, 0]))
    with pytest.raises(InputError, match=r"reward: got '6e\+20'; allowed: numbers whose squares are finite"):
        losses.grpo(returns.float() * 1e20, True)  # the deviation would be infinite, the advantages 0


def test_token_rewards_sum_to_the_penalised_return():
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    got = losses.token_rewards(t(1, 2), t([0.3, 0.6, 0.9], [0.4, 0.8, 99]), mask, beta=0.5)
    # -0.5 * kl / 3 and 1 at the third; -0.5 * kl / 2 and 2 at the second
    torch.testing.assert_close(got, t([-0.05, -0.1, 0.85], [-0.1, 1.8, 0]))


def test_gae_runs_over_time_and_stops_at_the_last_token():
    rewards, values = t([0, 0, 1], [0, 2, 99]), t([0.5, 0.4, 0.3], [0.1, 0.2, 99])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, targets = losses.gae(rewards, values, mask, gamma=0.9, gae_lambda=0.5)
    # row 0: delta = .9*.4-.5 = -.14, .9*.3-.4 = -.13, 1-.3 = .7; A_2 = .7, A_1 = -.13+.45*.7 = .185,
    #        A_0 = -.14+.45*.185 = -.05675.  row 1: A_1 = 2-.2 = 1.8, A_0 = .9*.2-.1+.45*1.8 = .89
    torch.testing.assert_close(advantages, t([-0.05675, 0.185, 0.7], [0.89, 1.8, 0]))
    torch.testing.assert_close(targets, t([0.44325, 0.585, 1.0], [0.99, 2.0, 0]))


def test_whitening_is_over_the_valid_entries_and_parts_add_up():
    values, mask = t([1, 2, 50], [6, 7, -9]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    # mean 4, variance (9 + 4 + 4 + 9) / 3
    got, factor = losses.whiten(values, mask)
    assert factor == pytest.approx((26 / 3) ** -0.5)
    torch.testing.assert_close(got, t([-3, -2, 0], [2, 3, 0]) * factor)
    over = losses.moments(values[:1], mask[:1]) + losses.moments(values[1:], mask[1:])
    parts = [losses.whiten(values[i : i + 1], mask[i : i + 1], over)[0] for i in (0, 1)]
    torch.testing.assert_close(torch.cat(parts), got)


def test_a_single_value_and_equal_values_are_not_whitened():
    for values, mask in ((t([3, 5]), [[1, 0]]), (torch.full((1, 2), 0.1), [[1, 1]])):
        whitened, factor = losses.whiten(values, torch.tensor(mask))
        assert not whitened.any() and factor == 1.0


@pytest.mark.parametrize("advantages", [losses.rloo, lambda r: losses.grpo(r, normalize_std=True)])
def test_a_completion_without_a_reward_is_in_no_baseline(advantages):
    """The others' advantages are those of the group without it, its own is 0; so is that of one that is alone."""
    want = advantages(t([1, 4, 7]))
    got = advantages(t([1, torch.nan, 4, 7], [3, torch.nan, torch.nan, torch.nan], [torch.nan] * 4))
    torch.testing.assert_close(got[:1, [0, 2, 3]], want)
    assert got[0, 1] == 0 and not got[1:].any()


def test_clipped_surrogate():
    ratios, advantages = t([0.5, 1.1, 1.5, 0.5, 1.5]), t([1, 1, 1, -1, -1])
    logps = ratios.log().requires_grad_()
    got = losses.clipped_surrogate(logps, torch.zeros_like(ratios), advantages, 0.2)
    # min(rho A, clip A): .5, 1.1, min(1.5, 1.2), min(-.5, -.8), min(-1.5, -1.2)
    torch.testing.assert_close(got, t([0.5, 1.1, 1.2, -0.8, -1.5]))
    # no gradient where the clipped branch is the smaller, rho A elsewhere
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logps)[0], t([0.5, 1.1, 0, 0, -1.5]))
    mask = torch.tensor([[1, 1, 1, 1, 0]])
    assert losses.clip_fraction(logps, torch.zeros_like(ratios), mask, 0.2).item() == pytest.approx(3 / 4)
