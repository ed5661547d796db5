"""Noise, supports, estimators."""

import pytest
import torch
from conftest import generator
from scipy import stats

from grade.gradients.estimators import Estimator, RelaxationConfig, find_estimator, relax
from grade.gradients.objective import Objective
from grade.gradients.replay import replay
from grade.gradients.straight_through import ReinMax, conditional_noise, draw_given
from grade.gradients.unrolled import checkpointed, unrolled
from grade.models.noise import gumbel_noise
from grade.plugins import ESTIMATORS


def reinmax(logits, token, tau):
    """Of one position over its full vocabulary."""
    every, token = torch.arange(len(logits)).unsqueeze(0), torch.tensor([token])
    return ReinMax().relax_given(logits.unsqueeze(0), None, every, token, tau)[0]


def test_noise_is_standard_gumbel_in_float32():
    noise = gumbel_noise((200_000,), generator())
    assert noise.dtype == torch.float32 and torch.isfinite(noise).all()
    # Kolmogorov-Smirnov: a right sampler falls below p = 1e-3 for one seed in a thousand; this seed is fixed.
    assert stats.kstest(noise.double().numpy(), "gumbel_r").pvalue > 1e-3
    assert noise.max() > 10, "bfloat16 noise has no tail"


@pytest.mark.parametrize(("support", "k"), [("perturbed_top_k", 1), ("perturbed_top_k", 3), ("top_k", 3), ("top_k", 0)])
def test_hard_tokens_follow_the_policy_or_its_truncation(support, k):
    """Chi-squared: perturbed supports sample the policy for any K; `top_k` its K likeliest tokens, for any tau."""
    n, logits = 40_000, torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0])
    config = RelaxationConfig(support=support, gumbel_topk=k)
    chosen, noise = Estimator().draw(logits.expand(n, 5), config, generator())
    y = relax((logits[chosen] + noise), tau=0.3, estimator="ste")
    counts = torch.bincount(chosen.gather(1, y.argmax(1, keepdim=True)).squeeze(1), minlength=5).double()
    p = logits.double().softmax(0)
    if support == "top_k" and k:
        p = torch.where(torch.arange(5) < k, p, 0) / p[:k].sum()
        assert (counts[k:] == 0).all()
        counts, p = counts[:k], p[:k]
    assert stats.chisquare(counts.numpy(), (n * p).numpy()).pvalue > 1e-3


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


def test_conditional_noise_averaged_over_tokens_is_independent_gumbel_noise():
    n, logits = 100_000, torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    token = torch.multinomial(logits.softmax(0), n, replacement=True, generator=generator())
    noise = conditional_noise(logits.expand(n, 3), token, generator(1))
    for column in noise.T:
        assert stats.kstest(column.numpy(), "gumbel_r").pvalue > 1e-3
    assert (torch.corrcoef(noise.T) - torch.eye(3)).abs().max() < 4 / n**0.5  # no correlation: sd 1 / sqrt(n)
    # Given the token the largest sum is Gumbel about log Z, whichever token it is, and independent of the token.
    top = (logits + noise).amax(1) - logits.logsumexp(0)
    for v in range(3):
        assert stats.kstest(top[token == v].numpy(), "gumbel_r").pvalue > 1e-3


def test_a_forbidden_token_gets_no_noise_and_no_weight():
    logits = torch.tensor([[0.0, float("-inf"), 1.0]])
    noise = conditional_noise(logits, torch.tensor([0]), generator())
    assert noise[0, 1] == 0 and torch.isfinite(noise).all()
    y = relax(logits + noise, 1.0, "gumbel_rao")
    assert y.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("support", ["perturbed_top_k", "top_k"])
@pytest.mark.parametrize("k", [1, 3, 0])
@pytest.mark.parametrize("estimator", ["ste", "gumbel_rao", "reinmax"])
def test_supports_given_a_token_hold_it_on_top(support, k, estimator):
    logits = torch.randn(50, 8, dtype=torch.float64, generator=generator())
    token = torch.randint(8, (50,), generator=generator(1))  # also tokens that are not among the K likeliest
    config = RelaxationConfig(estimator=estimator, support=support, gumbel_topk=k, rao_draws=5)
    draw = draw_given if estimator == "ste" else find_estimator(estimator).draw_given
    ids, noise = draw(logits, config, generator(2), token)
    assert ids.shape == noise.shape == ((50, 5, k or 8) if estimator == "gumbel_rao" else (50, k or 8))
    ids, noise = ids.view(50, -1, k or 8), noise.view(50, -1, k or 8)
    for draw in range(ids.shape[1]):
        assert all(len(set(row)) == (k or 8) for row in ids[:, draw].tolist())
        if estimator == "reinmax":
            assert (ids[:, draw] == token.unsqueeze(1)).any(1).all() and not noise.any()
        else:
            z = logits.gather(1, ids[:, draw]) + noise[:, draw]
            assert torch.equal(ids[:, draw].gather(1, z.argmax(1, keepdim=True)).squeeze(1), token)


def test_reinmax_is_exact_for_quadratic_functions_and_the_first_order_estimator_is_not():
    """Expectation over tokens, enumerated. Liu et al. 2023, theorem 3.1; straight-through without noise is Euler's."""
    a = torch.randn(5, 5, dtype=torch.float64, generator=generator())
    logits = torch.randn(5, dtype=torch.float64, generator=generator(1), requires_grad=True)
    f = lambda y: y @ a @ y + a[0] @ y  # noqa: E731
    (exact,) = torch.autograd.grad(logits.softmax(0) @ torch.stack([f(d) for d in torch.eye(5).double()]), logits)
    p, mean, first_order = logits.detach().softmax(0), 0, 0
    for token, (weight, d) in enumerate(zip(p, torch.eye(5, dtype=torch.float64), strict=True)):
        mean = mean + weight * torch.autograd.grad(f(reinmax(logits, token, 1.0)), logits)[0]
        soft = logits.softmax(0)
        first_order = first_order + weight * torch.autograd.grad(f(soft + (d - soft).detach()), logits)[0]
    torch.testing.assert_close(mean, exact)
    assert (first_order - exact).norm() > 0.1 * exact.norm()


class Sharp(Estimator):
    """Soft tokens at half the temperature."""

    hard = False

    def relax(self, z, tau):
        return (2 * z / tau).softmax(-1)


@pytest.mark.parametrize("engine", [replay, unrolled, checkpointed])
def test_a_new_estimator_needs_its_registration_only(engine, monkeypatch, backbone, prompts, reward):
    monkeypatch.setitem(ESTIMATORS, "toy", f"{__name__}:Sharp")
    config = RelaxationConfig.parse({"estimator": "toy", "max_new_tokens": 3, "gumbel_topk": 4})
    before = [p.detach().clone() for p in backbone.trainable_parameters()]
    optimizer = torch.optim.AdamW(backbone.trainable_parameters(), lr=1e-2)
    step = engine(backbone, prompts, Objective(reward, 0.1), config, generator())
    optimizer.step()
    assert step.completion_ids.shape == (3, 3) and torch.isfinite(step.loss)
    assert all(not torch.equal(p, q) for p, q in zip(before, backbone.trainable_parameters(), strict=True))
