"""The entropy probe's estimators against brute force, enumeration of every completion, and the optimizer itself."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_gpt2
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.entropy.change import linearity_error, prefix_change, reweighted_change
from grade.entropy.samples import (
    Directional,
    SampleScores,
    directional,
    draw,
    entropy_coefficients,
    prompt_gradients,
    scores_at,
    sequence_logps,
    two_batch,
    u_statistic,
)
from grade.entropy.update import adamw_update
from grade.entropy.vector import moved
from grade.errors import InputError
from grade.experiments.enumeration import (
    all_as_samples,
    completion_logps,
    every_completion,
    exact_change,
    exact_entropy,
    exact_gradient,
)
from grade.models import scoring
from grade.models.parameters import trained_parameters
from grade.models.prompts import PromptBatch

V, T = 5, 3


def tiny(seed=0, bias=False):
    """GPT-2: its layer norms are exact in float64, where Llama's go through float32; with a trained token bias."""
    backbone = make_backbone(tiny_gpt2(vocab_size=V, eos_token_id=[2]), seed=seed, target_modules=["c_attn"])
    if bias:
        backbone.set_token_bias(torch.tensor([0.5, -0.4, 0.3, 0.0, -0.2]), trainable=True)
    return backbone


def prompts(batch=2):
    made = make_prompts(batch, 4)
    return PromptBatch(made.ids % V, made.mask)


def drawn(backbone, batch=3, group=4, seed=0):
    return draw(backbone, prompts(batch), group, T, torch.Generator().manual_seed(seed), microbatch=4000)


def direction(backbone, seed=0):
    size = sum(p.numel() for p in trained_parameters(backbone))
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_likelier_token_takes_the_place_of_others_in_samples_and_moves_none_between_others():
    """Policies share the noise of each token; one uniform number for all would move many between the others."""
    base, other = tiny(), tiny()
    other.set_token_bias(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    before, after = (drawn(policy, group=100).ids[..., 0] for policy in (base, other))
    changed = before != after
    assert changed.any() and (after[changed] == 0).all()


# --- gradients ---


@pytest.mark.parametrize("microbatch", [1, 3, 8])
def test_streamed_gradients_are_those_of_one_graph(microbatch):
    backbone = tiny()
    samples = drawn(backbone)
    logps = sequence_logps(backbone, samples)
    c, other = entropy_coefficients(logps), torch.randn_like(logps)
    estimate = [prompt_gradients(backbone, samples, weights, microbatch) for weights in (c, other)]
    parameters = trained_parameters(backbone)
    for n in range(3):
        s = scoring.completion_logps(backbone, samples.prompts[[n] * 4], samples.ids[n], samples.mask[n]).sum(1)
        for weights, got in zip((c, other), estimate, strict=True):
            grads = torch.autograd.grad((weights[n] * s).sum(), parameters, retain_graph=True)
            torch.testing.assert_close(got[n], torch.cat([g.flatten() for g in grads]))
    assert all(p.grad is None for p in parameters)


@pytest.mark.parametrize("bias", [False, True])
def test_the_expected_gradient_is_minus_the_entropys(bias):
    """Every completion with its probability as weight: E[S grad S] = -grad H, to rounding."""
    backbone = tiny(bias=bias)
    samples, p = all_as_samples(backbone, prompts(), T)
    x = prompt_gradients(backbone, samples, p * sequence_logps(backbone, samples), microbatch=32)
    torch.testing.assert_close(x.mean(0), -exact_gradient(backbone, prompts(), T), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_mode_is_exact_over_every_completion(temperature, bias):
    """At the policy's own temperature."""
    backbone = tiny(bias=bias).view(temperature=temperature)
    v = direction(backbone)
    samples, p = all_as_samples(backbone, prompts(), T)
    estimate = directional(backbone, samples, v, microbatch=32)
    expected = float(exact_gradient(backbone, prompts(), T) @ v)
    for baseline in (torch.zeros_like(estimate.entropies), torch.full_like(estimate.entropies, 0.3)):
        got = float((p * estimate.per_sequence(baseline)).sum(1).mean())
        assert got == pytest.approx(expected, rel=1e-8)
    # The Rao-Blackwellised integrand has the same expectation as -S.
    entropy = float((p * estimate.entropies.sum(-1)).sum(1).mean())
    assert entropy == pytest.approx(float(exact_entropy(backbone, prompts(), T).detach()), rel=1e-10)


def test_the_baseline_is_the_mean_over_the_other_completions():
    """Entropies that follow a token: 2 and 0, 5 and 0; each completion's baseline is the other's."""
    entropies, d_logps = (torch.tensor([rows], dtype=torch.float64)
                          for rows in ([[1, 2], [3, 5]], [[1, 1], [10, 10]]))  # fmt: skip
    estimate = Directional(entropies, torch.zeros_like(entropies), d_logps)
    assert estimate.per_sequence().tolist() == [[(2 - 5) * 1, (5 - 2) * 10]]


def test_a_product_of_two_batches_and_its_error_by_hand():
    """Means 2 and 2; of 2 x the variance is 8, of 2 y it is 2, over two rows each."""
    x, y = torch.tensor([[1.0], [3.0]]), torch.tensor([[1.5], [2.5]])
    assert two_batch(x, y) == pytest.approx((4, math.sqrt(8 / 2 + 2 / 2)))


@settings(deadline=None, max_examples=30)
@given(st.integers(3, 7), st.integers(1, 4), st.integers(0, 1000))
def test_the_u_statistic_is_the_mean_over_pairs(batch, width, seed):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, batch, width, generator=generator, dtype=torch.float64)

    def brute_force(rows):
        return float(np.mean([x[i] @ y[j] for i in rows for j in rows if i != j]))

    value, stderrs = u_statistic(x, y)
    assert value == pytest.approx(brute_force(range(batch)), abs=1e-10)
    # Leaving out a prompt is the U-statistic of the others.
    without = np.array([brute_force([j for j in range(batch) if j != i]) for i in range(batch)])
    assert stderrs["jackknife"] == pytest.approx(np.sqrt((batch - 1) * without.var()), abs=1e-9)


# --- the update as a vector ---


def stepped(weight_decay=0.1, steps=3):
    backbone = tiny()
    parameters = trained_parameters(backbone)
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=weight_decay, betas=(0.8, 0.95))
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
    grads = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    return parameters, optimizer, grads


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("norm", [None, 0.5, 1e6])
def test_the_vector_is_the_step(steps, norm):
    parameters, optimizer, grads = stepped(steps=steps)
    vector = adamw_update(optimizer, parameters, grads, norm)
    start = torch.cat([p.detach().flatten() for p in parameters])
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, norm)
    optimizer.step()
    moved_by = torch.cat([p.detach().flatten() for p in parameters]) - start
    assert float((vector.total - moved_by).norm() / moved_by.norm()) < 1e-6
    assert (vector.clipped < 1) == (norm == 0.5)
    assert bool(vector.momentum.any()) == (steps > 0) and vector.decay.any()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.AdamW, amsgrad=True)])
def test_an_optimizer_that_the_vector_does_not_cover_is_refused(optimizer):
    parameters, _, grads = stepped(steps=0)
    with pytest.raises(InputError, match="AdamW without amsgrad"):
        adamw_update(optimizer(parameters, lr=0.1), parameters, grads)


# --- importance sampling ---


def test_reweighting_by_hand():
    logps = torch.tensor([[[[0.5], [0.5]]], [[[0.75], [0.25]]]], dtype=torch.float64).log()
    old, new = (SampleScores(each, -each) for each in logps)
    estimate = reweighted_change(old, new)
    # weights 1.5 and 0.5: after = (1.5 * 0.28768 + 0.5 * 1.38629) / 2 = 0.56234, the entropy of (3/4, 1/4)
    assert estimate.after == pytest.approx(0.75 * math.log(4 / 3) + 0.25 * math.log(4))
    assert estimate.before == pytest.approx(math.log(2))
    assert estimate.ess == pytest.approx(4 / (1.5**2 + 0.5**2))
    tokens = reweighted_change(old, new, torch.tensor([[[1.0], [3.0]]]))
    assert tokens.after == pytest.approx((1.5 * math.log(4 / 3) + 0.5 * math.log(4)) / (1.5 + 0.5 * 3))
    assert estimate.pareto_k() is None  # two samples


@pytest.mark.parametrize("k", [0.3, 0.7, 1.2])
def test_the_tail_of_weights_is_found(k):
    quantiles = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    log_weights = (-k * torch.log1p(-quantiles)).view(-1, 1, 1)  # Pareto of index 1 / k, whose tail has shape k
    old, new = (SampleScores(each, torch.ones_like(each)) for each in (torch.zeros_like(log_weights), log_weights))
    # 190 of its largest: a random sample would be off by (1 + k) / sqrt(190); quantiles lack the far end alone
    assert reweighted_change(old, new).pareto_k() == pytest.approx(k, abs=(1 + k) / 190**0.5)


# --- forward mode, and the change after a step ---


def test_forward_mode_of_a_large_vocabulary_in_float32_is_that_of_float64():
    config = tiny_gpt2(vocab_size=2**14 + 5)
    exact = make_backbone(config, target_modules=["c_attn"])
    rounded = make_backbone(config, torch.float32, target_modules=["c_attn"])
    rounded.model.load_state_dict(exact.model.state_dict())
    samples, v = drawn(exact, batch=2, group=2), direction(exact) / 30
    wanted, got = directional(exact, samples, v), directional(rounded, samples, v.float())
    torch.testing.assert_close(got.d_logps, wanted.d_logps, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(got.d_entropies, wanted.d_entropies, rtol=1e-3, atol=1e-4)
    assert (wanted.d_logps.abs() > 1e-2).any()


def test_forward_mode_per_token_is_the_derivative_of_the_quotient():
    """dH_tok against a central difference of E[sum H] / E[L] by enumeration; 4 standard errors, n = 4 x 4,000."""
    backbone = tiny()
    v = direction(backbone)
    samples = draw(backbone, prompts(4), 4000, T, torch.Generator().manual_seed(0), microbatch=4000)
    estimate = directional(backbone, samples, v, 4000)
    values = estimate.per_token(samples.mask)

    def per_token(eta):
        with torch.no_grad(), moved(backbone, v, eta):
            logps = completion_logps(backbone, prompts(4), T)
        _, mask = every_completion(V, T, (2,))
        return float(-(logps.exp() * logps).sum() / (logps.exp() * mask.sum(1)).sum())

    exact = (per_token(1e-4) - per_token(-1e-4)) / 2e-4
    stderr = float(values.std() / values.numel() ** 0.5)
    assert float(values.mean()) == pytest.approx(exact, abs=4 * stderr)
    assert stderr < 0.1 * abs(exact)  # else the bound would say nothing
    without = estimate.per_sequence().mean() / samples.mask.sum(-1).double().mean()
    assert abs(float(without) - exact) > 8 * stderr  # the denominator moves too


def test_weights_of_prefixes_are_unbiased_with_their_control_variate():
    """The expectation over every pair of completions is the true change, of a large step too."""
    backbone, v, eta = tiny(), direction(tiny()), 0.1
    samples, probabilities = all_as_samples(backbone, prompts(1), T)
    old, new = scores_at(backbone, samples), scores_at(backbone, samples, v, eta)
    pairs = torch.cartesian_prod(*[torch.arange(samples.ids.shape[1])] * 2)
    parts = prefix_change(*(SampleScores(s.logps[0, pairs], s.entropies[0, pairs]) for s in (old, new)))
    expected = float((probabilities[0, pairs].prod(1) * parts.mean(1)).sum())
    truth = exact_change(backbone, prompts(1), T, v, eta)
    assert abs(truth) > 0.01 and expected == pytest.approx(truth, rel=1e-9)


def test_linearity_error_is_a_ratio_and_its_jackknife():
    change, linear = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([[1.5], [2.0], [3.0], [4.0]])
    value, stderr = linearity_error(linear, change)
    assert value == pytest.approx(10.5 / 10 - 1)
    without = [9 / 9, 8.5 / 8, 7.5 / 7, 6.5 / 6]
    mean = sum(without) / 4
    assert stderr == pytest.approx(math.sqrt(3 / 4 * sum((w - mean) ** 2 for w in without)))
