"""Gradients of distilled rewards against the formula written out on dense logits, and against `rloo`."""

import math
import warnings

import pytest
import torch
from conftest import VOCAB, ToyReward, flat_grad, gradient, make_prompts

from grade.gradients.distilled.learner import DECAY, EVERY, DistilledGradient
from grade.gradients.distilled.ridge import Choice, centred
from grade.gradients.distilled.store import Fit
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import Completions, PolicyGradient, StepContext
from grade.models.scoring import predicting_hidden
from grade.rewards.base import Reward

GROUP, LENGTH, EARLY, BETA = 4, 6, 2, 0.3
ALL = ("counts", "bag")


class Constant(Reward):
    """A text reward that is the same within every prompt."""

    name = "constant"

    def score(self, policy, prompts, ids, mask):
        return prompts.ids.sum(1).double()


def objective(beta=BETA):
    return Objective(ToyReward(16), beta)


def learner(backbone, weight, families=("bag",), **changes):
    values = dict(
        method="distilled", residual_weight=weight, distil_families=list(families), num_generations=GROUP,
        max_completion_length=LENGTH, min_completion_length=EARLY,
    )  # fmt: skip
    return DistilledGradient(MethodConfig(**values | changes), backbone)


def choose_always(monkeypatch, choice):
    """This penalty and slope, whatever the data say."""
    monkeypatch.setattr("grade.gradients.distilled.store.choose", lambda *_: choice)


def microbatches(count=1, prompts=4, seed=0):
    return [(make_prompts(prompts, seed=seed + n), torch.Generator().manual_seed(seed + n)) for n in range(count)]


def take(own, batches, objective):
    """A step's gradient, with its results."""
    own.backbone.zero_grad(set_to_none=True)
    steps = own.step(batches, objective, StepContext(len(batches), lambda: None))
    return gradient(own.backbone), steps


def warmed(backbone, weight, families, count=1, beta=BETA, **changes):
    """A learner that has seen a batch, and the gradient of its next step."""
    own = learner(backbone, weight, families, **changes)
    take(own, microbatches(seed=50), objective(beta))
    batches = microbatches(count)
    found, steps = take(own, batches, objective(beta))
    return own, batches, found, steps


# ---- the formula, written out ----
def written_out(own, prompts, step, beta=BETA, rows=None):
    """Losses of plug-in, residual and KL of a microbatch: dense logits, one completion and position at a time."""
    backbone, group = own.backbone, own.config.group
    prompts, ids, mask = prompts.repeat(group), step.completion_ids, step.completion_mask
    rows = range(len(ids)) if rows is None else rows
    logits = backbone.head(predicting_hidden(backbone, prompts, ids))
    with torch.no_grad(), backbone.reference():
        reference = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
    logp = logits.log_softmax(-1)
    kl = (logp.exp() * (logp - reference)).sum(-1)
    drawn = logits.clone()
    drawn[:, : own.config.min_completion_length, list(backbone.eos_token_ids)] = -torch.inf
    drawn = drawn.log_softmax(-1)
    lengths = mask.sum(1).tolist()
    family, positions = own.families[own.fit.family], torch.arange(ids.numel())
    weights = own.fit.without(0, len(ids) // group) * own.trust
    s = family.values(weights, ids)(positions).double().expand(ids.numel(), VOCAB)
    if own.prior is not None:
        known = own.families[own.prior.family].values(own.prior.all, ids)(positions)
        s = s + own.store.prior_weight * known.expand(ids.numel(), VOCAB)
    s = s.view(*ids.shape, VOCAB)

    def expected(b, t):
        p = drawn[b, t].exp()
        return (p * s[b, t]).sum()

    penalised = {b: step.reward[b].double() - beta * kl[b, : lengths[b]].mean().detach() for b in rows}

    def judged(b, t):
        """What the reward has beyond the values of the tokens drawn, and of the future's expectation."""
        own_values = sum(s[b, u, ids[b, u]] for u in range(lengths[b]))
        future = sum(expected(b, u).detach() for u in range(t + 1, lengths[b]))
        return penalised[b] - own_values + future

    plug = residual = 0.0
    for b in rows:
        others = [c for c in rows if c // group == b // group and c != b]
        for t in range(lengths[b]):
            advantage = judged(b, t) - sum(judged(c, t) for c in others) / len(others)
            plug = plug + expected(b, t)
            residual = residual + advantage.detach() * drawn[b, t, ids[b, t]]
    penalty = sum(kl[b, : lengths[b]].mean() for b in rows)
    n = len(rows)
    return -plug / n, -residual / n, beta * penalty / n


@pytest.mark.parametrize("weight", [0.3, 1.0, "auto"])
def test_a_prior_adds_to_the_values_what_own_completions_confirmed(policy, weight):
    own = learner(policy, weight, ["bag", "counts"])
    generator = torch.Generator().manual_seed(3)
    worth = torch.randn(1, policy.hidden_size, generator=generator, dtype=torch.float64)
    own.prior = Fit("bag", worth, Choice(1.0, 0.3, 1.0, 0.1))
    for seed in range(3):
        before = own.transfer.trust
        batches = microbatches(seed=seed)
        found, [step] = take(own, batches, objective(BETA))
    assert own.store.prior_weight == before < 1 and own.fit is not None
    plug, residual, penalty = written_out(own, batches[0][0], step)
    used = float(own.figures["residual_weight"][0]) if weight == "auto" else weight
    assert 0 < used <= 1
    want = flat_grad(plug + used * residual + penalty, policy)
    assert (found - want).norm() <= (1e-6 if weight == "auto" else 1e-10) * want.norm()  # the log has float32
    # The fit of own completions is held to what the prior, with its weight, leaves of the rewards.
    bag, group = own.families["bag"], own.config.group
    known = bag.predict(worth[0], bag.rows(step.completion_ids, step.completion_mask)).double()
    missed = centred(step.reward.double() - before * known, group)
    torch.testing.assert_close(own.evidence.groups[-1][2], missed.view(-1, group).square().sum(1))


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_formula(policy, monkeypatch, family, weight):
    choose_always(monkeypatch, Choice(1.0, 0.3, 1.2, 0.4))  # there are values, whatever they explain
    own, [(prompts, _)], found, [step] = warmed(policy, weight, [family])
    mask = step.completion_mask
    assert mask.sum(1).min() <= LENGTH - 2 and own.fit.family == family
    assert torch.isin(step.completion_ids[:, :EARLY], torch.tensor(policy.eos_token_ids)).sum() == 0
    plug, residual, penalty = written_out(own, prompts, step)
    want = flat_grad(plug + weight * residual + penalty, policy)
    assert (found - want).norm() <= 1e-10 * want.norm()
    parts = [flat_grad(part, policy).norm() / want.norm() for part in (plug, residual, penalty)]
    assert min(parts) > 1e-3, "each part counts"
    reported = -step.reward.mean() + BETA * (step.kl * mask).sum(1).div(mask.sum(1)).mean()
    assert float(step.loss) == pytest.approx(float(reported), rel=1e-6)  # KL is reported in float32


# ---- auto ----
@pytest.mark.parametrize("family", ALL)
def test_auto_is_the_blend_of_parts_that_were_computed_apart(policy, monkeypatch, family):
    """Of one microbatch the halves are the parts; they are measured now and then, and weigh the steps between.

    The share of the squared gradient is the root of R2.
    """
    choose_always(monkeypatch, Choice(1.0, 0.3, 1.2, 0.4))
    own, moments = learner(policy, "auto", [family]), torch.zeros(3, dtype=torch.float64)
    for number in range(EVERY + 1):
        batches = microbatches(seed=number)
        found, [step] = take(own, batches, objective())
        plug, residual, penalty = (flat_grad(part, policy) for part in written_out(own, batches[0][0], step))
        if number in (0, EVERY):
            first, second = (
                flat_grad(written_out(own, batches[0][0], step, rows=rows)[1], policy) / 2
                for rows in (range(2 * GROUP), range(2 * GROUP, 4 * GROUP))
            )
            torch.testing.assert_close(first + second, residual)
            noise = max(float(residual @ residual) - 4 * float(first @ second), 0.0)  # |d|^2 - 2 d_1 d_2 / (1 - 1/2)
            size = float(plug @ plug) / own.reliability**2  # without the factor k t
            moments = DECAY * moments + torch.tensor([size, noise, 1.0], dtype=torch.float64)
        torch.testing.assert_close(own.blend.moments, moments, rtol=1e-9, atol=0)
        weight = own.blend.weight(math.sqrt(0.3), own.reliability)
        want = plug + weight * residual + penalty
        assert (found - want).norm() <= 1e-10 * want.norm()
        assert float(own.figures["residual_weight"][0]) == pytest.approx(weight, rel=1e-6)  # float32
        assert 0 < own.reliability < 1 and 1 - own.reliability < weight < 1


# ---- without values it is rloo ----
def rloo_gradient(backbone, prompts, steps, objective, **changes):
    values = dict(method="rloo", num_generations=GROUP, max_completion_length=LENGTH, min_completion_length=EARLY)
    own = PolicyGradient(MethodConfig(**values | changes), backbone)
    backbone.zero_grad(set_to_none=True)
    for each, step in zip(prompts, steps, strict=True):
        completions = Completions(each.repeat(own.config.group), step.completion_ids, step.completion_mask)
        own.accumulate(completions, objective, 1 / len(steps))
    return gradient(backbone)


@pytest.mark.parametrize(("weight", "uses"), [(1.0, False), (0.3, True)])
def test_the_unbiased_form_takes_no_values_that_its_own_rewards_chose(policy, monkeypatch, weight, uses):
    """The first step's family, penalty and slope have seen its rewards; those of the second are the first's."""
    own = learner(policy, weight)
    choose_always(monkeypatch, Choice(1.0, 0.3, 1.2, 0.4))
    batches = microbatches()
    found, steps = take(own, batches, objective())
    want = rloo_gradient(policy, [batches[0][0]], steps, objective())
    assert ((found - want).norm() > 1e-3 * want.norm()) == uses
    batches = microbatches(seed=1)
    found, steps = take(own, batches, objective())
    want = rloo_gradient(policy, [batches[0][0]], steps, objective())
    assert (found - want).norm() > 1e-3 * want.norm()


@pytest.mark.parametrize("weight", [1.0, "auto"])
def test_a_step_can_be_one_group(policy, weight):
    """The first teaches nothing of itself; the second is judged by the first, whether or not that helps."""
    own = learner(policy, weight)
    for seed in range(4):
        batches = microbatches(prompts=1, seed=seed)
        found, steps = take(own, batches, objective())
        assert found.isfinite().all() and found.any() and len(own.store) == GROUP * (seed + 1)
        if seed == 0:
            want = rloo_gradient(policy, [batches[0][0]], steps, objective())
            assert (found - want).norm() <= 1e-12 * want.norm()


@pytest.mark.parametrize("weight", [0.0, 1.0, "auto"])
def test_a_constant_reward_warns_once_and_trains_on_kl_alone(policy, weight):
    own, constant = learner(policy, weight, ALL), Objective(Constant(), BETA)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for seed in range(3):
            batches = microbatches(seed=seed)
            found, steps = take(own, batches, constant)
    assert [str(w.message).partition(":")[0] for w in seen if "reward" in str(w.message)] == [
        "the reward is equal within every group so far"
    ]
    assert own.fit is None and own.liked_tokens() is None and found.isfinite().all()
    if weight != 0:  # which has KL's own gradient alone, not that of the return's part
        want = rloo_gradient(policy, [batches[0][0]], steps, constant)
        assert (found - want).norm() <= 1e-9 * want.norm()
    with pytest.warns(UserWarning, match="nothing is learned from it"):
        found, _ = take(learner(policy, weight), microbatches(), Objective(Constant(), 0.0))
    # Rewards of up to 100 minus their own mean leave rounding, which the gradient of log-probabilities multiplies.
    assert found.abs().max() <= 1e-12


# ---- microbatches ----
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, "auto"])
@pytest.mark.parametrize("family", ALL)
def test_two_microbatches_are_one_of_their_size(policy, weight, family):
    """Also auto: its two parts are the halves of one batch."""
    found = []
    for count in (1, 2):
        own = learner(policy, weight, [family])
        for seed in (50, 0):
            whole = own.sample(*microbatches(seed=seed)[0])
            size = len(whole.ids) // count
            last = take(own, [whole[n * size : (n + 1) * size] for n in range(count)], objective())[0]
        found.append((last, own.fit.weights, own.blend.moments))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
    assert found[0][0].norm() > 1e-3


# ---- the rest ----


@pytest.mark.parametrize("prompts", [3, 8])
def test_a_window_smaller_than_a_step_is_enough(policy, prompts):
    """A fit has not seen the groups that it does not keep: it is the one without them."""
    own = learner(policy, 1.0, distil_window=2 * GROUP)
    for seed in range(2):
        found, _ = take(own, microbatches(prompts=prompts, seed=seed), objective())
        assert found.isfinite().all() and len(own.store) == 2 * GROUP
        assert len(own.fit.weights) == 1 + prompts
        whole, *each = own.fit.weights  # not times the slope, which is 0 here
        assert [torch.allclose(one, whole) for one in each] == [True] * (prompts - 2) + [False] * 2


@pytest.mark.parametrize("prompts", [1, 4])  # with one group, the blend compares a step with the one before
def test_a_learner_that_was_restored_takes_the_same_steps(policy, monkeypatch, prompts):
    choose_always(monkeypatch, Choice(1.0, 0.3, 1.2, 0.4))
    own = learner(policy, "auto", ALL)
    for seed in range(EVERY):
        take(own, microbatches(prompts=prompts, seed=seed), objective())
    again = learner(policy, "auto", ALL)
    again.load_tensors({name: value.clone() for name, value in own.tensors().items()})
    for seed in (EVERY, EVERY + 1):  # measures the blend, and uses it
        first, second = (take(each, microbatches(prompts=prompts, seed=seed), objective())[0] for each in (own, again))
        assert torch.equal(first, second)
        assert own.figures.keys() == again.figures.keys() and float(own.figures["residual_weight"][0]) < 1
        for name in set(own.figures) - {"distilled/seconds"}:
            assert torch.equal(own.figures[name][0], again.figures[name][0]), name


@pytest.mark.parametrize("weight", [0.0, "auto"])
def test_the_gradient_is_added_to_what_is_there(policy, monkeypatch, weight):
    choose_always(monkeypatch, Choice(1.0, 0.3, 1.2, 0.4))  # with a value from the first step, auto blends parts
    alone, _ = take(learner(policy, weight), microbatches(), objective())
    before = torch.linspace(-2, 2, len(alone), dtype=torch.float64)
    parameters = policy.trainable_parameters()
    for p, g in zip(parameters, before.split([p.numel() for p in parameters]), strict=True):
        p.grad = g.view_as(p).clone()
    learner(policy, weight).step(microbatches(), objective(), StepContext(1, lambda: None))
    torch.testing.assert_close(gradient(policy) - before, alone, rtol=0, atol=1e-14)  # rounding of 2 + g
