"""Parts of a distilled reward by hand: the sketch's constant, the shrunk slope, and the reward that is noted."""

import math

import pytest
import torch
from conftest import ToyReward, make_backbone, make_prompts, tiny_gpt2
from torch.nn import functional as F

from grade.gradients.distilled.families import Observed, make_family
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.distilled.ridge import Choice
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import StepContext
from grade.models.sampling import generate
from grade.models.scoring import completion_states


@pytest.fixture(scope="module")
def policy():
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])


def test_the_sketch_of_contexts_has_the_first_signs_last_row_for_its_constant(policy):
    prompts = make_prompts().repeat(2)
    ids, mask = generate(policy, prompts, 5, torch.Generator().manual_seed(0))
    seen = Observed(prompts, ids, mask, completion_states(policy, prompts, ids, mask, (1, 2)))
    family = make_family("values", policy)
    first, second = family._signs
    hidden = seen.states.predicting.to(family.dtype)
    unit = F.layer_norm(hidden, hidden.shape[-1:]) / math.sqrt(policy.hidden_size)
    context = torch.einsum("btd,df->btf", torch.cat([unit, torch.ones_like(unit[..., :1])], -1), first)
    tokens = torch.einsum("btf,btd,df->btf", context, policy.embed(ids).to(family.dtype), second)
    want = (tokens * mask.unsqueeze(-1)).sum(1) / math.sqrt(first.shape[1])
    torch.testing.assert_close(family.rows(seen), want)


@pytest.mark.parametrize(
    ("steepness", "stderr", "kept"),
    [(2.0, 0.0, 1.0), (2.0, 1.0, 0.75), (1.0, 1.0, 0.0), (1.0, 2.0, 0.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0)],
)
def test_a_slope_is_shrunk_by_its_error_and_never_turned_round(steepness, stderr, kept):
    choice = Choice(1.0, 0.5, steepness, stderr)
    assert choice.kept == pytest.approx(kept) and choice.slope == pytest.approx(steepness * kept)


def test_the_reward_that_is_noted_is_what_the_last_fit_says_of_the_new_completions(policy):
    objective = Objective(ToyReward(16), 0.1)
    config = MethodConfig(method="distilled", num_generations=4, max_completion_length=6, distil_families=["bag"])
    learner, context = DistilledGradient(config, policy), StepContext(1, lambda: None)
    learner.step([(make_prompts(4), torch.Generator().manual_seed(0))], objective, context)
    fit, level, figures = learner.fit, learner.level, learner.figures
    assert "distilled/reward" not in figures  # there was no fit yet
    (step,) = learner.step([(make_prompts(4, seed=1), torch.Generator().manual_seed(1))], objective, context)
    prompts = make_prompts(4, seed=1).repeat(4)
    ids, mask = step.completion_ids, step.completion_mask
    family = make_family("bag", policy)
    rows = family.rows(Observed(prompts, ids, mask, completion_states(policy, prompts, ids, mask, (1, 2))))
    want = float(family.predict(fit.all[0], rows).double().mean()) + float(level)
    assert float(learner.figures["distilled/reward"][0]) == pytest.approx(want, rel=1e-9)
    assert float(level) != 0
