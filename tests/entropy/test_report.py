"""What a report warns of and holds, and how many prompts a probe takes."""

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_config

from grade.entropy.functional import scores_at
from grade.entropy.probe import EntropyProbe
from grade.entropy.settings import ProbeConfig
from grade.errors import InputError
from grade.models.parameters import trained_parameters
from grade.models.prompts import PromptBatch

SOUND = {"ess": 60.0, "samples": 64.0, "resampled": 0.0, "pareto_k": 0.2}
MIXED = torch.tensor([[0.0, 1.0], [1.0, 1.0]])


def a_probe(batch=2, **estimate):
    values = {
        "batch_config": {"B": batch, "G": 4}, "generation": {"max_new_tokens": 3}, "probe_config": estimate,
        "importance_sampling": {"resample_on_low_ess": False},
    }  # fmt: skip
    policy = make_backbone(tiny_config(vocab_size=5, eos_token_id=[2]))
    optimizer = torch.optim.AdamW(trained_parameters(policy), lr=1e-4)
    return EntropyProbe(policy, optimizer, ProbeConfig.parse(values), allow_fresh=True)


def prompts(n):
    made = make_prompts(n, 4)
    return PromptBatch(made.ids % 5, made.mask)


def ones(_, ids, mask):
    return ((ids == 1) * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize(
    ("figures", "rewards", "says"),
    [
        ({}, MIXED, []),
        ({}, None, []),
        ({"ess": 32.0}, MIXED, []),  # a share of 0.5 is enough
        ({"ess": 31.0}, MIXED, ["effective sample size 31 is below 0.5 of 64: .* is not to be trusted"]),
        ({"ess": 31.0, "resampled": 1.0}, MIXED, ["effective sample size 31 .* is sampled anew"]),
        ({"pareto_k": 0.71}, MIXED, ["Pareto k 0.71 is above 0.7"]),
        ({"pareto_k": 0.71, "resampled": 1.0}, MIXED, []),
        ({"pareto_k": 0.7}, MIXED, []),
        ({}, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), ["the same reward"]),
    ],
)
def test_it_warns_of_what_cannot_be_trusted_and_of_nothing_else(figures, rewards, says):
    warnings = a_probe()._warnings(SOUND | figures, rewards)
    assert len(warnings) == len(says)
    for text, pattern in zip(warnings, says, strict=True):
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(text)


def test_one_batch_is_warned_of():
    assert "one batch" in a_probe(one_batch=True)._warnings(SOUND, None)[0]


@pytest.mark.parametrize(("one_batch", "needed"), [(False, 4), (True, 2)])
def test_it_takes_the_first_prompts_and_leaves_the_rest(one_batch, needed):
    probe, many = a_probe(one_batch=one_batch), prompts(needed + 2)
    exact, more = probe.run(many[:needed], ones), probe.run(many, ones)
    assert torch.equal(exact.step, more.step) and torch.equal(exact.sequences, more.sequences)
    with pytest.raises(InputError, match=f"prompts: got {needed - 1}; allowed: at least {needed}: "):
        probe.run(many[: needed - 1], ones)


@pytest.mark.parametrize("batch", [2, 3])
def test_the_error_of_linearity_takes_three_prompts(batch):
    report = a_probe(batch).run(prompts(2 * batch), ones)
    assert ("linearity_error" in report.figures) == (batch == 3)
    assert "samples=" not in repr(report) and "step=" not in repr(report)  # tensors without end


def test_completions_drawn_anew_from_the_same_policy_are_the_same():
    probe = a_probe(3)
    generator = torch.Generator().manual_seed(probe.config.seed)
    evaluation = probe._draw(prompts(3), slice(None), generator)
    old = scores_at(probe.policy, evaluation)
    found = probe._sampled_anew(evaluation, old)
    assert found["entropy_after"] == pytest.approx(float(old.entropies.sum(-1).mean()), rel=1e-12)  # of completions
    assert (found["delta_h"], found["delta_h_stderr"], found["delta_h_per_token"]) == pytest.approx(
        (0, 0, 0), abs=1e-12
    )
