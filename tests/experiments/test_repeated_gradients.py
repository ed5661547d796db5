"""Gradients of every estimator against enumeration, on a policy of five tokens; float64."""

import pytest
import torch

from grade.entropy.samples import prompt_gradients
from grade.experiments.enumeration import all_as_samples, random_prompts, tiny_policy
from grade.experiments.intervals import interval
from grade.experiments.moments import moments
from grade.experiments.repeated_gradients import KL, POLICY_GRADIENTS, FixedPolicy, Variant, random_rewards
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph, replay
from grade.gradients.rollout import sample
from grade.gradients.straight_through import redrawn

T, G, ROWS = 2, 64, 24
STE, RAO = Variant("ste", 1.0, T - 1), Variant("gumbel_rao", 1.0, T - 1, draws=8)
# GRPO's factor 1 - 1/G is that of the score function's part, and KL's gradient has another.
CASES = [(r, k) for r in ("bag", "trunk", KL) for k in POLICY_GRADIENTS if (r, k) != (KL, "grpo")]


@pytest.fixture(scope="module")
def fixed():
    policy = tiny_policy()
    prompts = random_prompts(policy, 2)
    return FixedPolicy(policy, prompts, G, T, random_rewards(policy), [STE, RAO], POLICY_GRADIENTS, kl=True)


@pytest.fixture(scope="module")
def exact(fixed):
    return fixed.exact()


@pytest.fixture(scope="module")
def rows(fixed):
    return fixed.rows(ROWS)


def against(exact, rows, reward, estimator):
    truth = exact[reward] * (1 - 1 / G if estimator == "grpo" else 1)
    return moments(rows[reward, estimator], truth, 2 * G)


@pytest.mark.parametrize("reward", ["bag", "trunk"])
def test_the_enumerated_gradient_is_the_score_functions_expectation(fixed, exact, reward):
    samples, p = all_as_samples(fixed.backbone, fixed.prompts, T)
    objective = Objective(fixed.rewards[reward], 0.0)
    values = []
    for n in range(2):
        prompts = fixed.prompts[[n] * p.shape[1]]
        embeds = fixed.backbone.embed(samples.ids[n])
        values.append(objective.reward(fixed.backbone.embed(prompts.ids), prompts, embeds, samples.mask[n]))
    values = torch.stack(values)
    grads = prompt_gradients(fixed.backbone, samples, p * values.detach(), microbatch=256)
    torch.testing.assert_close(grads.mean(0), exact[reward])
    assert float((p * values).sum(1).std()) > 0 and values.std() > 0.03  # rewards differ, or there is nothing to learn


@pytest.mark.parametrize(("reward", "kind"), CASES)
def test_policy_gradients_are_unbiased(rows, exact, reward, kind):
    """24 rows of 128 completions: bias along the truth and its squared norm within 3.5 standard errors (22 tests)."""
    m = against(exact, rows, reward, kind)
    for value in (interval(m.bias2), interval(m.inner - m.ref2)):
        assert abs(value.value) <= 3.5 * value.stderr


def test_relaxed_gradients_are_not_and_the_test_would_see_it(rows, exact):
    for reward in ("bag", "trunk"):
        found = interval(against(exact, rows, reward, STE.name).bias2)
        assert found.value > 10 * found.stderr


def test_averaging_over_noise_lowers_the_error(rows, exact):
    averaged, single = (against(exact, rows, "bag", variant.name).mse() for variant in (RAO, STE))
    assert interval(averaged / single, geometric=True).high < 1


def test_rows_are_projected_reproducible_and_differ(fixed, rows):
    again = fixed.rows(2, project=lambda gradient: gradient[:3])
    assert set(again) == {(r, e) for r in ("bag", "trunk", KL) for e in (*POLICY_GRADIENTS, STE.name, RAO.name)}
    for key, found in again.items():
        torch.testing.assert_close(found, rows[key][:2, :3])
        assert not torch.equal(rows[key][0], rows[key][1])


@pytest.mark.parametrize("variant", [STE, Variant("gumbel", 0.7, 1), Variant("reinmax", 1.0, 1, 3), RAO])
def test_a_rows_gradient_is_the_engines(fixed, variant):
    """Same prompts, supports and noise through `replay` with beta = 0 and sign turned."""
    backbone, relaxation = fixed.backbone, variant.relaxation(T)
    one = FixedPolicy(backbone, fixed.prompts, 4, T, {"trunk": fixed.rewards["trunk"]}, [variant], ())
    found = one.rows(1)["trunk", variant.name][0]
    generator = torch.Generator().manual_seed(0)
    drawn = relaxation if variant.estimator == "gumbel" else RelaxationConfig(gumbel_topk=5, max_new_tokens=T)
    prompts = one.prompts.repeat(4)
    rollout = sample(backbone, prompts, drawn, generator)
    if variant.estimator != "gumbel":
        rollout = redrawn(ReplayGraph(backbone, rollout), relaxation, generator)
    backbone.zero_grad(set_to_none=True)
    replay(backbone, prompts, Objective(fixed.rewards["trunk"], 0.0), relaxation, generator, hops=variant.hops,
           rollout=rollout)  # fmt: skip
    want = torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()])
    torch.testing.assert_close(-found, want)
    backbone.zero_grad(set_to_none=True)
