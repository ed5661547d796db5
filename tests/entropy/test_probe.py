"""The probe as a whole: it leaves everything as it was, agrees with itself, and with the truth by enumeration."""

import copy
import math

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_config

from grade.entropy.probe import EntropyProbe, ProbeConfig
from grade.entropy.samples import draw, scores_at
from grade.entropy.vector import moved, split_vector
from grade.errors import InputError
from grade.experiments.enumeration import exact_change
from grade.models.parameters import trained_parameters
from grade.models.prompts import PromptBatch

V, T = 5, 3


def settings(**changes):
    values = {
        "batch_config": {"B": 4, "G": 8},
        "generation": {"max_new_tokens": T},
        "memory_config": {"importance_microbatch_size": 8},
    }
    return ProbeConfig.parse(values | changes)


def a_policy():
    return make_backbone(tiny_config(vocab_size=V, eos_token_id=[2]))


def a_probe(learning_rate=1e-3, stepped=True, policy=None, **changes):
    policy = policy or a_policy()
    parameters = trained_parameters(policy)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.01)
    if stepped:
        generator = torch.Generator().manual_seed(1)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return EntropyProbe(policy, optimizer, settings(**changes))


def prompts(n=8):
    made = make_prompts(n, 4)
    return PromptBatch(made.ids % V, made.mask)


def reward(prompts, ids, mask):
    """The share of ones."""
    return ((ids == 1) * mask).sum(1) / mask.sum(1)


def test_policy_optimizer_and_random_state_are_as_before_and_two_runs_are_equal():
    probe = a_probe()
    parameters = [p.detach().clone() for p in probe.policy.parameters()]
    state, flags = copy.deepcopy(probe.optimizer.state_dict()), [m.training for m in probe.policy.modules()]
    random = torch.get_rng_state()
    first, second = probe.run(prompts(), reward), probe.run(prompts(), reward)
    assert all(torch.equal(p, q) for p, q in zip(parameters, probe.policy.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state()) and flags == [m.training for m in probe.policy.modules()]
    after = probe.optimizer.state_dict()["state"]
    assert all(torch.equal(state["state"][i][k], after[i][k]) for i in after for k in after[i])
    assert all(p.grad is None for p in probe.policy.parameters())
    timeless = [{k: v for k, v in r.figures.items() if not k.startswith("seconds/")} for r in (first, second)]
    assert timeless[0] == timeless[1] and torch.equal(first.sequences, second.sequences)


def test_a_trained_token_bias_is_part_of_the_step():
    policy = a_policy()
    policy.set_token_bias(torch.tensor([0.5, -0.4, 0.3, 0.0, -0.2]), trainable=True)
    probe = a_probe(policy=policy)
    report = probe.run(prompts(), reward)
    assert "bias.values" in report.modules and report.modules["bias.values"] != 0
    assert sum(report.modules.values()) == pytest.approx(report.figures["delta_h1"])
    samples = draw(policy, prompts(), 2, T, torch.Generator().manual_seed(0))
    at = scores_at(policy, samples, report.step)
    with moved(policy, report.step, 1.0):
        there = scores_at(policy, samples)
    torch.testing.assert_close((at.logps, at.entropies), (there.logps, there.entropies))


def test_parts_sum_to_the_whole():
    report = a_probe().run(prompts(), reward)
    f = report.figures
    assert sum(report.modules.values()) == pytest.approx(f["delta_h1"], rel=1e-9)
    parts = f["delta_h1_momentum"] + f["delta_h1_gradient"] + f["delta_h1_decay"]
    assert parts == pytest.approx(f["delta_h1"], rel=1e-9)
    assert float(report.sequences.mean()) == pytest.approx(f["delta_h1_forward"], rel=1e-9)
    assert report.sequences.shape == (4, 8)
    layers = report.layers()
    assert list(layers) == [0, 1] and sum(layers.values()) == pytest.approx(f["delta_h1"], rel=1e-9)
    assert layers[0] == pytest.approx(sum(v for k, v in report.modules.items() if ".layers.0." in k), rel=1e-12)
    text = report.as_text()
    assert "predicted change" in text and "q_proj" in text


def test_document_003s_number_has_the_preconditioner_before_the_step():
    """With second moments of 1 it is the gradient's part of the step but for the constants of AdamW."""
    probe = a_probe()
    for state in probe.optimizer.state.values():
        state["exp_avg_sq"].fill_(1.0)
    f, (beta1, beta2) = probe.run(prompts(), reward).figures, probe.optimizer.param_groups[0]["betas"]
    before = 1 / math.sqrt(1 / (1 - beta2))
    after = (1 - beta1) / (1 - beta1**2) / math.sqrt(beta2 / (1 - beta2**2))  # the gradient's own square is 1e-4
    assert f["delta_h1_ascent"] == pytest.approx(f["delta_h1_gradient"] * before / after, rel=1e-3)


@pytest.mark.parametrize("learning_rate", [1e-3, 0.3])
def test_the_true_change_is_found_after_a_small_step_and_by_sampling_anew_after_one_that_is_too_large(learning_rate):
    """To 4 standard errors, n = 6 prompts of 128 completions; weights say nothing of the large step."""
    probe = a_probe(
        learning_rate, batch_config={"B": 6, "G": 128},
        memory_config={"importance_microbatch_size": 256, "teacher_force_microbatch_size": 128},
    )  # fmt: skip
    batch = prompts(12)
    report = probe.run(batch, reward)
    f = report.figures
    # The truth for the evaluation prompts, whose expectation over completions is exact.
    truth = exact_change(probe.policy, batch[:6], T, report.step, 1.0)
    assert f["delta_h"] == pytest.approx(truth, abs=4 * f["delta_h_stderr"])
    if learning_rate == 0.3:
        assert f["resampled"] == 1 and "effective sample size" in report.warnings[0]
        return
    assert f["delta_h1_forward"] == pytest.approx(truth, abs=4 * f["delta_h1_forward_stderr"] + 0.05 * abs(truth))
    assert f["delta_h1"] == pytest.approx(truth, abs=4 * f["delta_h1_stderr"] + 0.05 * abs(truth))
    assert report.warnings == []


def test_what_is_sampled_anew_has_the_noise_of_what_was_sampled_before_the_step(monkeypatch):
    """After next to no step the completions are the same ones."""
    monkeypatch.setattr("grade.entropy.probe.ESS_SHARE", 1.1)  # always sampled anew
    f = a_probe(learning_rate=1e-12).run(prompts(), reward).figures
    assert f["resampled"] == 1 and abs(f["delta_h"]) < 1e-8 and abs(f["delta_h_per_token"]) < 1e-8


def test_a_sweep_is_the_probe_at_other_learning_rates():
    report = a_probe(probe_config={"multiples": [0.5, 1.0, 2.0]}).run(prompts(), reward)
    assert [row["multiple"] for row in report.sweep] == [0.5, 1.0, 2.0]
    for row in report.sweep:
        probe = a_probe()
        probe.optimizer.param_groups[0]["lr"] *= row["multiple"]
        other = probe.run(prompts(), reward).figures
        for name in ("delta_h1_forward", "delta_h", "delta_h_stderr", "delta_h_prefix", "linearity_error"):
            # The last is a small difference of ratios: rounding of float32 norms shows.
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-3 * (name == "linearity_error")), name
        assert row["ess_share"] == pytest.approx(other["ess"] / other["samples"], rel=1e-6)
    assert "step (x learning rate)" in report.as_text()


EPSILON = 1e6


def a_linear_probe(**changes):
    """A probe whose step is proportional to the gradient: nothing is clipped, and epsilon dwarfs its square."""
    probe = a_probe(stepped=False, max_grad_norm=0.0, **changes)
    probe.optimizer.param_groups[0].update(eps=EPSILON, weight_decay=0.0)
    return probe


def test_any_loss_can_be_the_update():
    """A loss whose gradient is that of the policy gradient gives the same report."""
    probe = a_linear_probe()
    expected = probe.run(prompts(), reward)
    seen = []

    def gradient(batch, generator):
        seen.append(batch.ids)
        parts = split_vector(probe.policy, expected.step * -EPSILON / probe.optimizer.param_groups[0]["lr"])
        for p, part in zip(trained_parameters(probe.policy), parts, strict=True):
            p.grad = part

    report = probe.run(prompts(), gradient=gradient)
    assert torch.equal(seen[0], prompts().ids[4:])
    assert report.figures["delta_h1"] == pytest.approx(expected.figures["delta_h1"], rel=1e-4)
    assert all(p.grad is None for p in probe.policy.parameters())


def test_too_few_prompts_and_rewards_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match="at least 8"):
        a_probe().run(prompts(7), reward)
    with pytest.raises(InputError, match="reward"):
        a_probe().run(prompts(), lambda p, ids, mask: torch.full((len(ids),), float("nan")))
