"""Rewards of every kind."""

import pytest
import torch

from grade.errors import InputError
from grade.experiments.rewards import BlackBox, Models, length_and_format, make_reward
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


@pytest.mark.parametrize("name", ["bag", "trunk"])
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


def test_nothing_of_a_black_box_is_seen_but_its_values(policy, batch):
    reward = make_reward(TOY, "tiny", "bag", policy)
    box = BlackBox(reward)
    assert torch.equal(box.score(policy, *batch), reward.score(policy, *batch))
    with pytest.raises(InputError, match="reward 'bag'.*a black box: only its values are known"):
        Objective(box).require_gradient("ste")
