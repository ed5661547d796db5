"""The probe's parts at the edges of what they take, and what they leave behind."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_config
from scipy.stats import genpareto

from grade.entropy.functional import scores_at
from grade.entropy.gradients import prompt_gradients
from grade.entropy.samples import Samples, draw
from grade.entropy.snis import linearity_error, prefix_change, reweighted_change
from grade.entropy.step import Snapshot
from grade.entropy.tiny import random_direction, random_prompts, tiny_policy
from grade.errors import InputError
from grade.models.parameters import trained_parameters
from grade.models.prompts import PromptBatch


def a_policy():
    return make_backbone(tiny_config(vocab_size=5, eos_token_id=[2]))


def drawn(policy, batch=2, group=3):
    made = make_prompts(batch, 4)
    return draw(policy, PromptBatch(made.ids % 5, made.mask), group, 3, torch.Generator().manual_seed(0))


def test_scores_have_no_graph():
    policy = a_policy()
    scores = scores_at(policy, drawn(policy))
    assert not scores.logps.requires_grad and not scores.entropies.requires_grad


def test_a_snapshot_gives_back_which_modules_were_in_training():
    policy = a_policy()
    optimizer = torch.optim.AdamW(trained_parameters(policy))
    for flag in (True, False):
        policy.train(flag)
        snapshot = Snapshot.of(policy, optimizer)
        policy.train(not flag)
        snapshot.restore()
        assert {module.training for module in policy.modules()} == {flag}


def test_gradients_of_a_base_are_refused_unless_allowed():
    policy = a_policy()
    samples = drawn(policy)
    policy.decoder.requires_grad_(True)
    with pytest.raises(InputError, match="allow_full"):
        prompt_gradients(policy, samples, [torch.ones(2, 3)])
    (rows,) = prompt_gradients(policy, samples, [torch.ones(2, 3)], allow_full=True)
    assert rows.shape == (2, sum(p.numel() for p in trained_parameters(policy, allow_full=True)))


@pytest.mark.parametrize("wrong", range(4))
def test_weights_of_prefixes_take_equal_shapes_alone(wrong):
    parts = [torch.zeros(2, 2, 3) for _ in range(4)]
    parts[wrong] = torch.zeros(1, 2, 3)  # would be broadcast
    with pytest.raises(ValueError, match="equal shapes"):
        prefix_change(*parts)


def test_three_prompts_are_enough_for_a_jackknife_and_two_are_not():
    linear, change = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[2.0], [2.0], [4.0]])
    value, stderr = linearity_error(linear, change)
    without = np.array([5 / 6, 4 / 6, 3 / 4])
    assert value == pytest.approx(6 / 8 - 1)
    assert stderr == pytest.approx(math.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum()))
    with pytest.raises(InputError, match="at least 3"):
        linearity_error(linear[:2], change[:2])


def test_the_shape_of_the_tail_is_fitted_to_its_published_share():
    logs = torch.randn(20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = reweighted_change(torch.zeros(20, 20), logs, torch.ones(20, 20), torch.ones(20, 20))
    weights = np.sort(np.exp(logs.flatten().numpy() - float(logs.max())))[::-1]
    weights = weights / weights.mean()
    excess = weights[:60] - weights[60]  # min(400 / 5, 3 sqrt(400)) = 60 of 400
    assert found.pareto_k == pytest.approx(float(genpareto.fit(excess / excess.mean(), floc=0)[0]), rel=1e-6)
    assert found.clipped == 0.0
    few = reweighted_change(torch.zeros(7, 7), logs[:7, :7], torch.ones(7, 7), torch.ones(7, 7))
    assert few.pareto_k is None  # fewer than 50


@pytest.mark.parametrize("temperature", [0.0, math.inf, math.nan, -1.0])
def test_temperatures_without_a_distribution_are_refused(temperature):
    policy = a_policy()
    samples = drawn(policy)
    with pytest.raises(InputError, match="temperature"):
        Samples(samples.prompts, samples.ids, samples.mask, temperature)
    with pytest.raises(InputError, match="temperature"):
        draw(policy, samples.prompts, 2, 3, torch.Generator(), temperature)
    assert draw(policy, samples.prompts, 2, 3, torch.Generator(), 0.5).temperature == 0.5


def test_the_tiny_policy_is_the_same_everywhere():
    # Weights drawn with a deviation of 0.3, and an adapter that is not zero, as the experiments' tables have them.
    policy = tiny_policy()
    table = policy.embedding_weight
    assert float(table.std()) == pytest.approx(0.3, rel=0.1)
    assert all(float(p.detach().abs().max()) > 0 for p in trained_parameters(policy))
    same = torch.Generator().manual_seed(0)
    ids = torch.randint(3, policy.vocab_size, (2, 4), generator=same)
    assert torch.equal(random_prompts(policy, 2).ids, ids)
    v = random_direction(policy)
    again = torch.randn(v.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(v, again / again.norm()) and float(v.norm()) == pytest.approx(1)


def test_the_error_of_entropy_per_token_is_that_of_the_quotient():
    # Against a jackknife over 400 prompts; the two differ by less than a tenth at this size.
    generator = torch.Generator().manual_seed(0)
    logs = 0.3 * torch.randn(400, 2, generator=generator, dtype=torch.float64)
    old, new = (torch.rand(400, 2, generator=generator, dtype=torch.float64) + 1 for _ in range(2))
    lengths = torch.randint(1, 6, (400, 2), generator=generator).double()
    found = reweighted_change(torch.zeros_like(logs), logs, old * lengths, new * lengths, lengths)
    w = logs.exp()

    def change(rows):
        after = (w * new * lengths)[rows].sum() / (w * lengths)[rows].sum()
        return float(after - (old * lengths)[rows].sum() / lengths[rows].sum())

    every = torch.arange(400)
    assert found.change == pytest.approx(change(every), rel=1e-9)
    without = np.array([change(every[every != n]) for n in range(400)])
    assert found.stderr == pytest.approx(math.sqrt(399 * without.var()), rel=0.1)


def test_a_snapshot_gives_back_the_devices_generators_too(monkeypatch):
    policy, given = a_policy(), []
    snapshot = Snapshot.of(policy, torch.optim.AdamW(trained_parameters(policy)))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", given.append)
    snapshot.restore()
    assert given == [] or torch.cuda.is_available()
    states = [torch.zeros(2), torch.ones(2)]
    dataclasses.replace(snapshot, random=[torch.get_rng_state(), states[0]]).restore()
    dataclasses.replace(snapshot, random=[torch.get_rng_state(), *states]).restore()
    assert [len(devices) for devices in given[-2:]] == [1, 2] and given[-1][1] is states[1]


def test_completions_of_other_shapes_are_refused():
    policy = a_policy()
    samples = drawn(policy)
    wrong = [
        (samples.prompts, samples.ids[:, :, :2], samples.mask), (samples.prompts, samples.ids[0], samples.mask[0]),
        (samples.prompts[:1], samples.ids, samples.mask),
    ]  # fmt: skip
    for prompts, ids, mask in wrong:
        with pytest.raises(ValueError, match="ids and mask of shapes"):
            Samples(prompts, ids, mask)
    with pytest.raises(ValueError, match="empty"):
        Samples(samples.prompts, samples.ids, samples.mask * 0)
