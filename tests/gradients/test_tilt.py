"""The limit against other laws and enumeration, and token values against rewards whose values are known."""

import itertools
import math

import numpy as np
import pytest
import torch

from grade.gradients import tilt
from grade.gradients.objective import Objective
from grade.gradients.tilt import (
    PENALTIES,
    Agreement,
    Law,
    efficiency,
    fit_values,
    gradient_values,
    limit_at,
    limit_for,
    predictions,
)
from grade.models.batch import Completions, PromptBatch
from grade.models.head import EmbeddingTable
from grade.rewards.base import EmbeddingReward
from grade.rewards.rewards import Rewards
from grade.training.toy import toy_task


def rewards(prompts=16, n=1024, seed=0):
    return torch.randn(prompts, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("kl", [0.1, 1.0, 2.0])
def test_no_other_law_of_the_same_kl_has_more_reward(kl):
    best, r = limit_at(rewards(), kl), rewards()
    assert best.kl == pytest.approx(kl, abs=1e-9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):  # other laws on the same samples: noise beside the reward, each prompt with a lambda of its own
        strength = torch.rand(16, 1, generator=generator, dtype=torch.float64) * 4
        logits = strength * (r + 0.5 * torch.randn(r.shape, generator=generator, dtype=torch.float64))
        w = logits.softmax(1)
        other = float((w * (w * 1024).log()).sum(1).mean())
        if other <= kl:
            assert float((w * r).sum(1).mean()) <= best.reward + 1e-12


def test_the_least_kl_of_a_gain_is_the_inverse_of_the_largest_reward_at_a_kl():
    best = limit_at(rewards(), 1.5)
    assert limit_for(rewards(), best.reward - float(rewards().mean())).kl == pytest.approx(1.5, abs=1e-9)


def test_efficiency_has_the_sign_of_the_gain_and_is_one_at_the_limit():
    gain = limit_at(rewards(), 1.0).reward - float(rewards().mean())
    assert efficiency(rewards(), gain, 1.0) == pytest.approx(1.0)
    assert efficiency(rewards(), gain, 4.0) == pytest.approx(0.25)
    assert efficiency(rewards(), -gain, 1.0) < 0


def test_the_standard_error_is_that_of_the_prompts_at_equal_kl():
    means = [limit_at(rewards(64, seed=seed), 1.0).reward for seed in range(60)]
    assert limit_at(rewards(64), 1.0).stderr == pytest.approx(np.std(means), rel=0.35)  # 60 repetitions: 9 %


@pytest.mark.parametrize(
    ("values", "kl"), [(rewards(n=64), 2.0), (torch.ones(4, 64), 1.0)], ids=["too few", "constant"]
)
def test_what_the_samples_cannot_tell_is_nan_with_a_warning(values, kl):
    with pytest.warns(UserWarning, match="64 samples per prompt cannot tell the limit at"):
        law = limit_at(values, kl)
    assert math.isnan(law.reward) and math.isnan(law.kl)


def test_with_independent_tokens_the_bias_is_the_limit_by_enumeration():
    p, s = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    rows = [torch.tensor(y) for y in itertools.product(range(3), repeat=4)]
    number = [round(float(p[y].prod() * 10**4)) for y in rows]  # an exact sample of 10,000 completions
    sample = torch.cat([s[y].sum().repeat(k) for y, k in zip(rows, number, strict=True)]).unsqueeze(0)
    c = 0.7
    q = (p.log() + c * s).softmax(0)
    law = Law.tilted(sample, c)
    assert law.reward == pytest.approx(4 * float(q @ s), abs=1e-9)
    assert law.kl == pytest.approx(4 * float(q @ (q / p).log()), abs=1e-9)


def completions(n=800, vocab=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (n, 8), generator=generator)
    mask = (torch.arange(8) < torch.randint(1, 9, (n, 1), generator=generator)).long()
    return ids, mask, torch.randn(vocab, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("how", ["groups", "prompts"])
def test_values_are_found_and_what_the_prompt_explains_is_no_merit(how):
    ids, mask, true = completions()
    prompts = (
        completions(seed=1)[:2]
        if how == "prompts"
        else [x[::4].repeat_interleave(4, 0) for x in completions(seed=1)[:2]]
    )
    easy = torch.randn(12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    of_prompt = (5 * easy[prompts[0]] * prompts[1]).sum(1)
    of_tokens = (true[ids] * mask).sum(1)
    noise = torch.randn(len(ids), generator=torch.Generator().manual_seed(3), dtype=torch.float64) * of_tokens.std()
    options = {"group": 4} if how == "groups" else {"prompts": PromptBatch(*prompts)}
    values, r2, _ = fit_values(ids, mask, of_prompt + of_tokens, 12, **options)
    assert r2 > 0.97 and torch.allclose(values.double(), true, atol=0.1)
    _, noisy, _ = fit_values(ids, mask, of_prompt + of_tokens + noise, 12, **options)
    assert 0.4 < noisy < 0.55  # half of the variance is the tokens'
    if how == "groups":
        assert Agreement.of(predictions(values, ids, mask), of_prompt + of_tokens, 4).r2 > 0.97


@pytest.mark.parametrize("how", ["groups", "prompts"])
def test_values_are_the_solution_of_the_ridge_regression(how):
    ids, mask, true = completions(60)
    prompts = completions(60, seed=1)[:2]
    y = (true[ids] * mask).sum(1) + torch.randn(60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    options = {"group": 4} if how == "groups" else {"prompts": PromptBatch(*prompts)}
    values, *_ = fit_values(ids, mask, y, 12, **options)
    design = torch.stack([torch.bincount(i[m.bool()], minlength=12) for i, m in zip(ids, mask, strict=True)]).double()
    if how == "prompts":
        others = [torch.bincount(i[m.bool()], minlength=12) for i, m in zip(*prompts, strict=True)]
        design = torch.cat([design, torch.stack(others).double()], 1)
    parts = 15 if how == "groups" else 1
    x, z = (each - each.mean(1, keepdim=True) for each in (design.view(parts, -1, design.shape[1]), y.view(parts, -1)))
    x, z = x.flatten(0, 1), z.flatten()
    unit = torch.eye(x.shape[1], dtype=x.dtype)
    exact = [torch.linalg.solve(x.T @ x + penalty * unit, x.T @ z)[:12] for penalty in PENALTIES]
    assert sum(bool((values - one).norm() < 1e-3 * one.norm()) for one in exact) == 1


def test_noise_is_not_explained_although_groups_share_their_mean():
    ids, mask, _ = completions(160)
    noise = torch.randn(160, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    values, r2, _ = fit_values(ids, mask, noise, 12, group=4)
    assert r2 < 0.05
    assert Agreement.of(predictions(values, *completions(160, seed=5)[:2]), noise, 4).r2 < 0.1


def test_completions_without_a_reward_do_not_count_and_the_others_of_their_group_do():
    ids, mask, true = completions()
    prompt = torch.randn(200, generator=torch.Generator().manual_seed(6), dtype=torch.float64).repeat_interleave(4)
    values = (true[ids] * mask).sum(1) + prompt
    missing = values.clone()
    missing[::4] = torch.nan
    kept = torch.arange(800) % 4 > 0
    found, r2, slope = fit_values(ids, mask, missing, 12, group=4)
    same = fit_values(ids[kept], mask[kept], values[kept], 12, group=3)
    assert torch.equal(found, same[0]) and (r2, slope) == same[1:] and r2 > 0.97
    predicted = predictions(found, ids, mask)
    # r = 1 but for the penalty: noise, so that t is not that of rounding
    predicted = predicted + torch.randn(800, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    found = Agreement.of(predicted, missing, 4)
    assert found == Agreement.of(predicted[kept], values[kept], 3)
    freedom = lambda found: found.t**2 * (1 - found.r2) / found.r2  # noqa: E731
    assert freedom(found) == pytest.approx(400)
    alone = Agreement.of(predicted, missing.index_fill(0, torch.tensor([1, 2]), torch.nan), 4)
    assert freedom(alone) == pytest.approx(398)  # a completion alone says nothing


def test_agreement_is_the_correlation():
    ids, mask, true = completions()
    y = (true[ids] * mask).sum(1) + 3 * torch.randn(
        800, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )
    predicted = predictions(true, ids, mask)
    assert torch.equal(predicted, (true[ids] * mask).sum(1))
    whole = Agreement.of(predicted, y, 800)
    r = float(torch.corrcoef(torch.stack([predicted, y]))[0, 1])
    assert whole.r2 == pytest.approx(r**2) and whole.t == pytest.approx(r * (799 / (1 - r**2)) ** 0.5)
    assert whole.slope == pytest.approx(float(torch.cov(torch.stack([predicted, y]))[0, 1] / predicted.var()))
    assert Agreement.of(-predicted, y, 800) == (-whole.r2, 0.0, -whole.t)
    nothing = torch.zeros(0)
    assert Agreement.of(nothing, nothing, 4) == (0.0, 0.0, 0.0)


def test_too_few_completions_give_no_values():
    ids, mask, _ = completions(8)
    values, r2, _ = fit_values(ids, mask, torch.randn(8), 12, group=4)
    assert r2 == 0 and not values.any()


@pytest.mark.parametrize("scope", ["completion", "prompt_and_completion"])
def test_the_gradient_of_a_reward_linear_in_embeddings_gives_its_values(scope, monkeypatch):
    policy = toy_task().backbone
    weight = torch.randn(policy.embedding_weight.shape[1], generator=torch.Generator().manual_seed(0))
    reward = EmbeddingReward(lambda embeds, mask: ((embeds @ weight) * mask).sum(1), scope=scope)
    ids = torch.randint(0, policy.vocab_size, (6, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    prompts = PromptBatch(ids[:, :2], torch.ones_like(ids[:, :2]))
    monkeypatch.setattr(tilt, "BATCH", 4)
    values = gradient_values(Objective(reward, 0.0, scope), policy, Completions(prompts, ids, mask))
    true = policy.embed(torch.arange(policy.vocab_size)) @ weight
    assert torch.allclose(values, true - true[ids[mask.bool()]].mean(), atol=1e-5)


def test_values_of_rewards_that_read_tables_of_their_own_add_up():
    policy, noise = toy_task().backbone, torch.Generator().manual_seed(0)
    one, two = (EmbeddingTable(torch.randn(policy.vocab_size, 3, generator=noise), 2.0) for _ in range(2))
    weights = torch.randn(4, 3, generator=noise)
    parts = [EmbeddingReward(lambda embeds, mask, w=w: ((embeds @ w) * mask).sum(1), "completion", reads=table)
             for w, table in zip(weights, (one, two, one, two), strict=True)]  # fmt: skip
    ids = torch.randint(0, policy.vocab_size, (6, 5), generator=noise)
    prompts = PromptBatch(ids[:, :2], torch.ones_like(ids[:, :2]))
    objective = Objective(Rewards(parts, [1.0, 2.0, 3.0, 0.0], "completion"), scope="completion")
    values = gradient_values(objective, policy, Completions(prompts, ids, torch.ones_like(ids)))
    true = 2.0 * (one.weight @ (weights[0] + 3 * weights[2]) + two.weight @ (2 * weights[1]))
    assert torch.allclose(values, true - true[ids].mean(), atol=1e-4)
