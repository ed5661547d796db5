"""An evaluation: the same prompts and noise for every policy, each value with its prompt."""

from functools import partial

import pytest
import torch
from conftest import perturb_adapter

from grade import encode_prompts, evaluate, generate
from grade.gradients.objective import sequence_mean
from grade.models.noise import gumbel_noise
from grade.models.prompts import decode
from grade.models.scoring import sequence_kl
from grade.training.evaluate import NoiseBlocks
from grade.training.toy import toy_task

SIZES = dict(max_new_tokens=5, max_prompt_tokens=6)


@pytest.fixture(scope="module")
def task():
    """A policy that is not the reference."""
    task = toy_task()
    perturb_adapter(task.backbone)
    return task


@pytest.fixture(scope="module")
def evaluation(task):
    return evaluate(task.backbone, task.validation_prompts[:7], task.reward_model, task.judge, **SIZES)


def test_values_are_those_of_the_completions_that_the_seed_draws(task, evaluation):
    policy, texts = task.backbone, task.validation_prompts[:7]
    prompts = encode_prompts(policy.tokenizer, texts, 6)
    noise = partial(gumbel_noise, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ids, mask = generate(policy, prompts, 5, noise)
        each = sequence_kl(policy, prompts, ids, mask)
        kl = sequence_mean(each, mask)
        read = torch.cat([policy.embed(prompts.ids), policy.embed(ids)], 1)
        reward = task.reward_model(read, torch.cat([prompts.mask, mask], 1))
    assert evaluation.completions == [decode(policy.tokenizer, i, m) for i, m in zip(ids, mask, strict=True)]
    assert evaluation.reward == pytest.approx(reward.numpy(), abs=1e-6)
    assert evaluation.kl == pytest.approx(kl.numpy(), abs=1e-6) and evaluation.kl.min() > 1e-4
    whole = each.double().sum(1).numpy()
    assert evaluation.kl_per_completion == pytest.approx(whole, abs=5e-6) and (mask.sum(1) > 1).any()
    assert evaluation.summary(0.0)["eval_kl_per_completion"] == pytest.approx(whole.mean(), abs=5e-6)
    texts = [prompt + text for prompt, text in zip(evaluation.prompts, evaluation.completions, strict=True)]
    assert evaluation.gold.tolist() == task.judge.score(texts).tolist()


@pytest.mark.parametrize("changes", [dict(batch_size=2), dict(kl_prompts=3, batch_size=2)])
def test_batches_change_nothing_and_kl_is_of_the_first_prompts_alone(task, evaluation, changes):
    other = evaluate(task.backbone, task.validation_prompts[:7], task.reward_model, **SIZES | changes)
    assert other.completions == evaluation.completions
    assert len(other.kl) == changes.get("kl_prompts", 7)
    assert other.kl == pytest.approx(evaluation.kl[: len(other.kl)], abs=1e-6)
    assert other.kl_per_completion == pytest.approx(evaluation.kl_per_completion[: len(other.kl)], abs=5e-6)


N, V, T, BLOCK = 22, 5, 3, 8


def drawn(batch_size, ended_after=T):
    """Noise [N, ended_after, V], taken batch by batch."""
    noise = NoiseBlocks(torch.Generator().manual_seed(3), N, V, T, BLOCK)
    parts = []
    for start in range(0, N, batch_size):
        stop = min(start + batch_size, N)
        draw = noise.rows(start, stop)
        parts.append(torch.stack([draw((stop - start, V)) for _ in range(ended_after)], 1))
    return torch.cat(parts)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 8, 12, 16, 22, 64])
def test_any_batches_give_the_same_noise_also_where_all_texts_ended_early(batch_size):
    for tokens in (1, T):
        assert torch.equal(drawn(batch_size, tokens), drawn(BLOCK)[:, :tokens])
