"""The probe as a whole: it leaves everything as it was, agrees with itself, and with the truth by enumeration."""

import copy

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_config

from grade.entropy.exact import exact_change
from grade.entropy.gradients import trained_parameters
from grade.entropy.probe import EntropyProbe, ProbeConfig
from grade.errors import InputError
from grade.prompts import PromptBatch

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
    return EntropyProbe(policy, optimizer, settings(**changes), allow_fresh=not stepped)


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


def test_parts_sum_to_the_whole():
    report = a_probe().run(prompts(), reward)
    f = report.figures
    assert sum(report.modules.values()) == pytest.approx(f["delta_h1"], rel=1e-9)
    parts = f["delta_h1_momentum"] + f["delta_h1_gradient"] + f["delta_h1_decay"]
    assert parts == pytest.approx(f["delta_h1"], rel=1e-9)
    assert float(report.sequences.mean()) == pytest.approx(f["delta_h1_forward"], rel=1e-9)
    assert report.sequences.shape == (4, 8)
    text = report.as_text()
    assert "predicted change" in text and "q_proj" in text


def test_prediction_and_importance_sampling_find_the_true_change():
    probe = a_probe(batch_config={"B": 6, "G": 128}, memory_config={"importance_microbatch_size": 256,
                                                                   "teacher_force_microbatch_size": 128})  # fmt: skip
    batch = prompts(12)
    report = probe.run(batch, reward)
    f = report.figures
    # The truth for the evaluation prompts, whose expectation over completions is exact.
    step = update_of(probe, batch)
    truth = exact_change(probe.policy, PromptBatch(batch.ids[:6], batch.mask[:6]), T, step, 1.0)
    assert f["delta_h"] == pytest.approx(truth, abs=4 * f["delta_h_stderr"])
    assert f["delta_h1_forward"] == pytest.approx(truth, abs=4 * f["delta_h1_forward_stderr"] + 0.05 * abs(truth))
    assert f["delta_h1"] == pytest.approx(truth, abs=4 * f["delta_h1_stderr"] + 0.05 * abs(truth))
    assert report.warnings == []


def update_of(probe, batch):
    c = probe.config.batch_config
    generator = torch.Generator().manual_seed(probe.config.seed)
    probe._draw(batch, slice(c.B), generator)
    update = probe._draw(batch, slice(c.B, 2 * c.B), generator)
    return probe._update(update, reward)[1].total


def test_a_step_that_is_too_large_is_said_to_be():
    report = a_probe(learning_rate=0.1).run(prompts(), reward)
    assert any("effective sample size" in text for text in report.warnings)
    constant = a_probe().run(prompts(), lambda p, ids, mask: torch.ones(len(ids)))
    assert any("same reward" in text for text in constant.warnings)


def test_memory_is_profiled_when_asked_for():
    report = a_probe(memory_config={"profile_memory": True}).run(prompts(), reward)
    peaks = {k: v for k, v in report.figures.items() if k.startswith("peak_bytes/")}
    assert len(peaks) == 5 and min(peaks.values()) > 0


def test_what_cannot_be_probed_is_refused_and_nothing_changes():
    with pytest.raises(InputError, match="at least 8"):
        a_probe().run(prompts(7), reward)
    with pytest.raises(InputError, match="reward"):
        a_probe().run(prompts(), lambda p, ids, mask: torch.full((len(ids),), float("nan")))
    probe = EntropyProbe(a_policy(), torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]), settings())
    with pytest.raises(InputError, match="parameters"):
        probe.run(prompts(), reward)
    fresh = a_probe(stepped=False)
    fresh.allow_fresh = False
    with pytest.raises(InputError, match="no state"):
        fresh.run(prompts(), reward)
    for field, values in (("batch_config", {"G": 1}), ("batch_config", {"B": 1}), ("generation", {"temperature": 0.0}),
                          ("memory_config", {"teacher_force_microbatch_size": 0})):  # fmt: skip
        with pytest.raises(InputError, match=field):
            settings(**{field: values})
