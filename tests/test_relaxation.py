"""Noise, supports, estimators."""

import math

import pytest
import torch
from scipy import stats

from grade.errors import InputError
from grade.relaxation import RelaxationConfig, draw_support, gumbel_noise, relax, tau_at


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_noise_is_standard_gumbel_in_float32():
    noise = gumbel_noise((200_000,), generator())
    assert noise.dtype == torch.float32 and torch.isfinite(noise).all()
    # Kolmogorov-Smirnov: a right sampler falls below p = 1e-3 for one seed in a thousand; this seed is fixed.
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-3
    assert noise.max() > 10, "bfloat16 noise has no tail"
    assert torch.equal(noise, gumbel_noise((200_000,), generator()))
    assert not torch.equal(noise, gumbel_noise((200_000,), generator(1)))


@pytest.mark.parametrize(("support", "k"), [("perturbed_top_k", 1), ("perturbed_top_k", 3), ("top_k", 3), ("top_k", 0)])
def test_hard_tokens_follow_the_policy_or_its_truncation(support, k):
    """Chi-squared: perturbed supports sample the policy for any K; `top_k` its K likeliest tokens, for any tau."""
    n, logits = 40_000, torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    config = RelaxationConfig(support=support, gumbel_topk=k)
    chosen, noise = draw_support(logits.expand(n, 5), config, generator())
    y = relax((logits[chosen] + noise), tau=0.3, estimator="ste")
    counts = torch.bincount(chosen.gather(1, y.argmax(1, keepdim=True)).squeeze(1), minlength=5).double()
    p = logits.double().softmax(0)
    if support == "top_k" and k:
        p = torch.where(torch.arange(5) < k, p, 0) / p[:k].sum()
        assert (counts[k:] == 0).all()
        counts, p = counts[:k], p[:k]
    assert stats.chisquare(counts.numpy(), (n * p).numpy()).pvalue > 1e-3


def test_full_support_is_the_vocabulary_in_order():
    chosen, noise = draw_support(torch.zeros(2, 6), RelaxationConfig(gumbel_topk=0), generator())
    assert torch.equal(chosen, torch.arange(6).expand(2, 6)) and noise.shape == (2, 6)


def test_perturbed_support_holds_the_largest_sums_and_their_noise():
    logits = torch.randn(3, 20, generator=generator(5))
    config = RelaxationConfig(gumbel_topk=4)
    chosen, noise = draw_support(logits, config, generator(7))
    everything = gumbel_noise((3, 20), generator(7))
    assert torch.equal(chosen, (logits + everything).topk(4).indices)
    assert torch.equal(noise, everything.gather(1, chosen))


@pytest.mark.parametrize("tau", [0.1, 1.0, 10.0])
def test_estimators_share_a_gradient_and_differ_in_value(tau):
    z = torch.randn(4, 7, dtype=torch.float64, generator=generator(), requires_grad=True)
    g = torch.randn(4, 7, dtype=torch.float64, generator=generator(1))
    soft, hard = relax(z, tau, "gumbel"), relax(z, tau, "ste")
    assert set(hard.unique().tolist()) == {0.0, 1.0} and torch.equal(hard.sum(1), torch.ones(4, dtype=torch.float64))
    assert torch.equal(hard.argmax(1), z.argmax(1))
    got = torch.autograd.grad(hard, z, g)[0]
    torch.testing.assert_close(got, torch.autograd.grad(soft, z, g)[0])
    # Softmax by hand: d/dz_i sum_j g_j y_j = y_i (g_i - sum_j g_j y_j) / tau
    y = torch.exp(z / tau) / torch.exp(z / tau).sum(1, keepdim=True)
    torch.testing.assert_close(got, (y * (g - (g * y).sum(1, keepdim=True)) / tau).detach())


def test_tau_schedule():
    assert tau_at(0, 2.0, 0.5, 2000) == 2.0
    assert tau_at(250, 2.0, 0.5, 2000) == pytest.approx(1.8125)  # as far as the paper's 250 steps came
    assert tau_at(5, 2.0, 0.5, 0) == 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tau": 0.0}, "tau: got 0.0; allowed: greater than 0"),
        ({"tau": math.inf}, "tau: got inf"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"gumbel_topk": -1}, "gumbel_topk: got -1"),
        ({"estimator": "stee"}, "estimator: got 'stee'; allowed: 'gumbel' or 'ste'"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(InputError, match=message):
        RelaxationConfig.parse(values)


def test_a_support_larger_than_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="gumbel_topk: got 51; allowed: 0 .* to 50"):
        RelaxationConfig(gumbel_topk=51).check(50)
    with pytest.raises(InputError, match="min_new_tokens: got 9"):
        RelaxationConfig(min_new_tokens=9, max_new_tokens=8, gumbel_topk=0).check(50)
