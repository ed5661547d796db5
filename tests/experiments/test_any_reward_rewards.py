"""Rewards of every kind, and the policy that is right about some sums."""

from dataclasses import replace

import pytest
import torch

from grade.errors import InputError
from grade.experiments.any_reward.measure.explained import scored_completions
from grade.experiments.rewards import (
    BlackBox,
    Models,
    Subject,
    length_and_format,
    load_subject,
    make_reward,
    right_sum,
)
from grade.experiments.sums import sum_prompts, sums_tokenizer
from grade.gradients.objective import Objective
from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.rewards.functions import decode_texts
from grade.rewards.gold import GoldJudge
from grade.training.toy import toy_reviews, toy_task

TOY = Models()
TEXTS = ["The film was", "This movie was dull and", "Last night's show", "Her new drama was a delight, and"]


@pytest.fixture(scope="module")
def policy():
    return toy_task().backbone


@pytest.fixture(scope="module")
def batch(policy):
    """Two completions of each prompt; prompts are padded, some completions end early."""
    prompts = encode_prompts(policy.tokenizer, TEXTS, 8).repeat(2)
    ids, mask = generate(policy, prompts, 8, torch.Generator().manual_seed(0), stop_early=False)
    mask[3, 5:] = 0
    return prompts, ids, mask


def whole_texts(policy, batch):
    texts = decode_texts(policy.tokenizer, *batch)
    return [p + c for p, c in zip(texts.prompts, texts.completions, strict=True)]


@pytest.mark.parametrize("name", ["bag", "trunk1"])
def test_rewards_of_embeddings_score_what_they_differentiate(policy, batch, name):
    prompts, ids, mask = batch
    reward = make_reward(TOY, "tiny", name, policy)
    embeds = policy.embed(torch.cat([prompts.ids, ids], 1)).detach().requires_grad_()
    value = reward.differentiable(embeds, torch.cat([prompts.mask, mask], 1))
    torch.testing.assert_close(reward.score(policy, *batch), value.detach())
    (gradient,) = torch.autograd.grad(value.sum(), embeds)
    assert (gradient[3, prompts.ids.shape[1] :].norm(dim=-1) > 0).tolist() == [True] * 5 + [False] * 3
    again = make_reward(TOY, "tiny", name, policy).score(policy, *batch)
    torch.testing.assert_close(again, reward.score(policy, *batch), rtol=0, atol=0)


def test_another_bases_trunk_reads_the_text_with_its_own_tokenizer(policy, batch):
    other = toy_task(seed=1, kind="trunk")
    values, base = make_reward(TOY, "tiny", "smollm2_trunk", policy).score(policy, *batch), other.backbone
    for text, value in zip(whole_texts(policy, batch), values, strict=True):
        ids = torch.tensor([base.tokenizer(text)["input_ids"]])  # alone, so without padding
        torch.testing.assert_close(value, other.reward_model(base.embed(ids), torch.ones_like(ids))[0])
    assert policy.tokenizer.get_vocab() != base.tokenizer.get_vocab()


def test_functions_of_text_read_what_they_should(policy, batch, tmp_path):
    reviews = toy_reviews(80, seed=5)
    judge = GoldJudge.fit([r.text for r in reviews], [r.label for r in reviews])
    judge.save(tmp_path / "judge.npz")
    gold = make_reward(Models(gold_file=str(tmp_path / "judge.npz")), "tiny", "gold", policy).score(policy, *batch)
    assert gold.tolist() == pytest.approx(judge.score(whole_texts(policy, batch)))  # prompt and completion
    rule = make_reward(TOY, "tiny", "rule", policy).score(policy, *batch)
    assert rule.tolist() == pytest.approx(length_and_format(decode_texts(policy.tokenizer, *batch).completions))


def test_a_verifier_of_sums_knows_the_answer():
    prompts = ["12+7=", "12+7=", "1+1=", "40+9=", "9+9="]
    assert right_sum(prompts, ["19", "91", "2", "4", ""]) == [1, 0, 1, 0, 0]
    with pytest.raises(InputError, match="^prompt: got '12-7='"):
        right_sum(["12-7="], ["5"])


def test_nothing_of_a_black_box_is_seen_but_its_values(policy, batch):
    reward = make_reward(TOY, "tiny", "bag", policy)
    box = BlackBox(reward)
    assert torch.equal(box.score(policy, *batch), reward.score(policy, *batch))
    with pytest.raises(InputError, match="reward 'bag'.*a black box: only its values are known"):
        Objective(box).require_gradient("ste")


def test_samples_are_those_of_the_policy_group_by_group(policy):
    prompts = encode_prompts(policy.tokenizer, TEXTS * 9, 8)
    subject = Subject("tiny", "untrained", policy, {"rule": make_reward(TOY, "tiny", "rule", policy)}, prompts, 5, 5)
    rewards, _, seen = scored_completions(subject, {}, 72)
    assert rewards["rule"].dtype == torch.float32 and all(part.mask.all() for part in seen)
    generator, repeated = torch.Generator().manual_seed(0), prompts.repeat(4)
    for part, rows in zip(seen, (slice(0, 64), slice(64, 72)), strict=True):
        drawn, valid = generate(policy, repeated[rows], 5, generator, min_new_tokens=5, stop_early=False)
        assert torch.equal(part.ids, drawn)
        scores = subject.rewards["rule"].score(policy, repeated[rows], drawn, valid)
        assert torch.equal(rewards["rule"][rows], scores)
    for n in (0, 70, 148):
        with pytest.raises(InputError, match=f"completions: got {n}; allowed: a multiple of 4, up to 144"):
            scored_completions(subject, {}, n)


# --- the policy of sums ---


def test_the_policy_of_sums_is_right_about_some():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    subject = load_subject(TOY, "sums", ["sums"])
    assert torch.equal(torch.get_rng_state(), state)
    tokenizer = subject.backbone.tokenizer
    ids = tokenizer("12+7=19")["input_ids"]
    assert ids == sums_tokenizer()("12+7=19")["input_ids"] and tokenizer.decode(ids) == "12+7=19"
    for texts, n in zip(sum_prompts(), (2000, 500), strict=True):
        assert len(texts) == n
        part = replace(subject, prompts=encode_prompts(tokenizer, texts[:256], 6))
        values = scored_completions(part, {}, 1024)[0]["sums"]
        # What the task is for: neither hopeless nor solved, on prompts that were learned and on others.
        assert 0.05 < values.mean() < 0.95
        assert (values.view(-1, 4).std(1) > 0).any()
