"""Gradients of distilled rewards: against naive formulas by enumeration, and their worth on a toy policy."""

import math

import numpy as np
import pytest
import torch

from grade.experiments.any_reward.measure import enumerated, worth
from grade.experiments.any_reward.measure.explained import explained
from grade.experiments.any_reward.metrics import worst_deviation
from grade.experiments.moments import moments
from grade.experiments.rewards import Models, load_subject
from grade.gradients.distilled.families import make_family
from grade.gradients.distilled.ridge import Spectrum, centred
from grade.gradients.losses import rloo
from grade.gradients.objective import Objective
from grade.models.parameters import flatten
from grade.models.scoring import predicting_hidden

EXACT = 1e-12  # float64 rounding of sums over some 1,800 pairs, relative to the gradient


@pytest.fixture(scope="module")
def world():
    return enumerated.World()


@pytest.fixture(scope="module")
def critics(world):
    return enumerated.make_critics(world, n=64, best=128)


@pytest.fixture(scope="module")
def table(world, critics):
    names = "counts fitted", "values fitted", "trunk fitted", "ngrams adversarial", "counts adversarial", "zero"
    return enumerated.exact_table(world, {name: critics[name] for name in names}).set_index(["critic", "estimator"])


@pytest.fixture(scope="module")
def toy():
    return load_subject(Models(new_tokens=4), "tiny", ["bag", "rule"])


def sizes(**changes):
    values = dict(rewards=["bag", "rule"], prompts=4, families=["counts", "trunk"], fitted=[16, 64], rows=4)
    return worth.Gradients(**values | dict(reference=2) | changes)


@pytest.fixture(scope="module")
def rows(toy):
    return worth.gradient_rows(toy, sizes())


def naive(world, fit, prompt, baseline):
    """Corrected gradient of every completion of a prompt [N, P], term by term, with a given baseline."""
    policy, n = world.backbone, world.probabilities.shape[1]
    family, own = make_family(fit.family, policy), slice(prompt * n, (prompt + 1) * n)
    seen, found = world.seen[own], []
    for row in range(n):
        one = seen[slice(row, row + 1)]
        length = int(one.mask.sum())
        pi = policy.head(predicting_hidden(policy, one.prompts, one.ids)).softmax(-1)[0, :length]
        s = family.values(fit.all, one)(torch.arange(length)).expand(length, -1)
        sbar, token = (pi * s).sum(1), one.ids[0, :length]
        owns = s[torch.arange(length), token].sum()
        terms = 0.0
        for t in range(length):
            advantage = world.rewards[prompt, row] - owns + sbar[t + 1 :].sum() - baseline
            terms = terms + sbar[t] + advantage.detach() * pi[t, token[t]].log()
        found.append(flatten(torch.autograd.grad(terms, policy.trainable_parameters())))
    return torch.stack(found)


@pytest.mark.parametrize("critic", ["counts fitted", "values fitted", "ngrams adversarial"])
def test_the_corrected_gradient_is_the_naive_one_and_unbiased_with_any_constant_baseline(world, critics, table, critic):
    mean = torch.zeros_like(world.truth)
    for prompt, p in enumerate(world.probabilities):
        mean += p @ naive(world, critics[critic], prompt, 0.7) / len(world.prompts)
    assert (mean - world.truth).norm() < EXACT * world.truth.norm()
    assert table.loc[(critic, "corrected"), "bias"] < EXACT  # the learner's own, with its leave-one-out baseline


def test_useless_critics_give_rloo_and_a_perfect_one_removes_most_noise(table):
    noise = table.variance
    assert noise["zero", "corrected"] == pytest.approx(noise["none", "rloo"])
    assert noise["trunk fitted", "corrected"] == pytest.approx(noise["none", "rloo"])  # not additive
    assert table.loc[("none", "rloo"), "bias"] < EXACT
    assert noise["counts adversarial", "corrected"] > noise["none", "rloo"]
    law = enumerated.law_table([1.0], [0.0, 0.5, 1.0], ["counts"], n=256).set_index("scale")
    assert law.gain[0.0] == pytest.approx(1) and law.r2[0.5] == pytest.approx(0.75, abs=1e-3)
    assert law.r2[1.0] > 0.999 and law.gain[1.0] > 10 and law.gain[0.5] < law.law[0.5]


def test_the_sampled_mean_agrees_and_a_wrong_gradient_would_not(world, critics):
    chosen = {name: critics[name] for name in ("counts fitted", "values random")}
    table = enumerated.bias_table(world, chosen, samples=1600, steps=3, step_groups=4)
    assert set(table.critic) == {"none", *chosen, *enumerated.STEPS} and len(table) == 6 * 4
    drawn = table[~table.critic.isin(enumerated.STEPS)]  # three steps have no standard error to speak of
    worst = worst_deviation(drawn)
    assert worst["tests"] == 12 and worst["worst"] < 3.5 and worst["p"] > 0.005
    assert drawn.groupby("critic").stderr.first()["counts fitted"] < drawn.groupby("critic").stderr.first()["none"]
    # Along the truth the plug-in alone is far off, by more than these errors.
    exact = enumerated.exact_table(world, {"counts fitted": critics["counts fitted"]})
    plugin = exact[exact.estimator == "plugin"].iloc[0]
    assert plugin.bias > 5 * drawn[(drawn.critic == "counts fitted") & (drawn.direction == 0)].stderr.iloc[0]


def test_r2_is_that_of_fits_without_the_group_and_its_error_a_jackknife():
    generator = torch.Generator().manual_seed(0)
    x = centred(torch.randn(40, 3, generator=generator, dtype=torch.float64), 4)
    y = centred(x[:, 0] + 0.5 * torch.randn(40, generator=generator, dtype=torch.float64), 4)
    choice, stderr = explained(Spectrum.of(x @ x.T), y, 4)
    said = torch.empty(40, dtype=torch.float64)
    for group in range(10):
        out = torch.zeros(40, dtype=torch.bool)
        out[4 * group : 4 * group + 4] = True
        ridge = choice.penalty * torch.eye(3, dtype=torch.float64)
        w = torch.linalg.solve(x[~out].T @ x[~out] + ridge, x[~out].T @ y[~out])
        said[out] = x[out] @ w

    def r2(keep):
        return float((said[keep] @ y[keep]) ** 2 / (said[keep] @ said[keep]) / (y[keep] @ y[keep]))

    assert choice.r2 == pytest.approx(r2(slice(None)))
    without = np.array([r2([i for i in range(40) if i // 4 != group]) for group in range(10)])
    assert stderr == pytest.approx(math.sqrt(0.9 * ((without - without.mean()) ** 2).sum()))
    nothing, none = explained(Spectrum.of(x @ x.T), torch.zeros(40, dtype=torch.float64), 4)
    assert math.isnan(nothing.r2) and math.isnan(none)


def test_gradients_of_a_row_are_the_learners(rows):
    names = set(rows.gradients)
    assert {(n.reward, n.estimator) for n in names} >= {("bag", "st"), ("bag", "ste_tau2_hops1"), ("rule", "rloo")}
    assert ("rule", "st") not in {(n.reward, n.estimator) for n in names}
    for name in (n for n in names if n.estimator == "corrected" and n.weight == 1.0):
        plug, third = (rows.gradients[name._replace(estimator=e, weight=w)] for e, w in
                       (("plugin", 0.0), ("corrected", 0.3)))  # fmt: skip
        assert torch.allclose(third, plug + 0.3 * (rows.gradients[name] - plug), atol=1e-6)


def test_rloo_of_a_row_is_the_policy_gradient(toy, rows):
    learner, prompts = toy.learner(), worth.Batches(toy, sizes()).prompts
    generator = torch.Generator().manual_seed(worth.SEED)
    chosen = torch.randperm(len(prompts), generator=generator)[:4]
    sample = learner.scored(learner.sample(prompts[chosen], generator), Objective(toy.rewards["bag"], 0.0))
    policy, seen = toy.backbone, sample.seen
    logits = policy.head(predicting_hidden(policy, seen.prompts, seen.ids))
    logits[..., list(policy.eos_token_ids)] = float("-inf")  # all completions have T tokens
    logps = logits.log_softmax(-1).gather(2, seen.ids.unsqueeze(2)).squeeze(2).sum(1)
    advantages = rloo(sample.reward.view(-1, 4)).flatten()
    exact = flatten(torch.autograd.grad((advantages * logps).mean(), policy.trainable_parameters()))
    gradient = rows.gradients[worth.Name("bag", "rloo")][0]
    assert torch.allclose(gradient, exact, atol=1e-5 * float(exact.norm()))


def test_worth_is_that_of_the_moments_and_a_zero_gradient_is_worth_nothing(toy, rows):
    table = worth.worth_table(toy, sizes(), rows)
    assert len(table) == 2 * len(rows.gradients) and set(table.reference) == {4 * 2 * 16}
    unit = table[(table.estimator == "rloo") & (table.reward == "bag")]
    truth = moments(rows.reference["bag"], rows.reference["bag"], 2 * 16)
    assert unit.rloo_cosine.iloc[0] == pytest.approx(truth.cosine(1)[0], nan_ok=True)
    name = next(n for n in rows.gradients if n.estimator == "plugin")
    zero = worth.Rows({name: torch.zeros(4, 9)}, {name.reward: torch.randn(4, 9)})
    assert worth.worth_table(toy, sizes(batches=[1]), zero).worth.tolist() == [0.0]
