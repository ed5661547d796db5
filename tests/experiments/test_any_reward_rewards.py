"""Rewards of every kind, and the policy that is right about some sums."""

import pytest
import torch

from grade.errors import InputError
from grade.experiments.any_reward.measure.rewards import (
    REWARDS,
    BlackBox,
    Folders,
    Subject,
    length_and_format,
    make_reward,
    right_sum,
    sample_scored,
)
from grade.experiments.any_reward.measure.sums import build_sums, load_sums, sums_tokenizer
from grade.gradients.objective import Objective
from grade.models.prompts import encode_prompts
from grade.models.sampling import generate
from grade.rewards.functions import decode_texts
from grade.rewards.gold import GoldJudge
from grade.training.toy import toy_reviews, toy_task

TOY = Folders()
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


@pytest.mark.parametrize("name", ["bag", "trunk1", "trunk"])
def test_rewards_of_embeddings_score_what_they_differentiate(policy, batch, name):
    prompts, ids, mask = batch
    reward = make_reward(name, policy, TOY)
    embeds = policy.embed(torch.cat([prompts.ids, ids], 1)).detach().requires_grad_()
    value = reward.differentiable(embeds, torch.cat([prompts.mask, mask], 1))
    torch.testing.assert_close(reward.score(policy, *batch), value.detach())
    (gradient,) = torch.autograd.grad(value.sum(), embeds)
    assert (gradient[3, prompts.ids.shape[1] :].norm(dim=-1) > 0).tolist() == [True] * 5 + [False] * 3
    again = make_reward(name, policy, TOY).score(policy, *batch)
    torch.testing.assert_close(again, reward.score(policy, *batch), rtol=0, atol=0)


def test_another_bases_trunk_reads_the_text_with_its_own_tokenizer(policy, batch):
    other = toy_task(seed=1, kind="trunk")
    values, base = make_reward("smollm2_trunk", policy, TOY).score(policy, *batch), other.backbone
    for text, value in zip(whole_texts(policy, batch), values, strict=True):
        ids = torch.tensor([base.tokenizer(text)["input_ids"]])  # alone, so without padding
        torch.testing.assert_close(value, other.reward_model(base.embed(ids), torch.ones_like(ids))[0])
    assert policy.tokenizer.get_vocab() != base.tokenizer.get_vocab()


def test_functions_of_text_read_what_they_should(policy, batch, tmp_path):
    reviews = toy_reviews(80, seed=5)
    judge = GoldJudge.fit([r.text for r in reviews], [r.label for r in reviews])
    judge.save(tmp_path / "judge.npz")
    gold = make_reward("gold", policy, Folders(gold=str(tmp_path / "judge.npz"))).score(policy, *batch)
    assert gold.tolist() == pytest.approx(judge.score(whole_texts(policy, batch)))  # prompt and completion
    rule = make_reward("rule", policy, TOY).score(policy, *batch)
    assert rule.tolist() == pytest.approx(length_and_format(decode_texts(policy.tokenizer, *batch).completions))


def test_the_rule_counts_short_words_and_finished_sentences():
    # 3 of 5 words have at most four letters; the last full stop is the 11th of 24 characters.
    texts = ["It was fun. Great acting", "  It was fun. Great acting \n", "So it is!", "wonderful", "", "!!!", "a? b"]
    expected = [(3 / 5 + 11 / 24) / 2] * 2 + [1.0, 0.0, 0.0, 0.5, 0.75]
    assert length_and_format(texts) == pytest.approx(expected)


def test_a_verifier_of_sums_knows_the_answer():
    prompts = ["12+7=", "12+7=", "1+1=", "40+9=", "9+9="]
    assert right_sum(prompts, ["19", "91", "2", "4", ""]) == [1, 0, 1, 0, 0]
    with pytest.raises(InputError, match="^prompt: got '12-7='"):
        right_sum(["12-7="], ["5"])


@pytest.mark.parametrize("name", ["bag", "rule"])
def test_nothing_of_a_black_box_is_seen_but_its_values(policy, batch, name):
    reward = make_reward(name, policy, TOY)
    box = BlackBox(reward)
    assert torch.equal(box.score(policy, *batch), reward.score(policy, *batch)) and box.name == name
    assert not box.score(policy, *batch).requires_grad
    with pytest.raises(InputError, match=f"reward '{name}'.*a black box: only its values are known"):
        Objective(box).require_gradient("ste")


def test_samples_are_those_of_the_policy_group_by_group(policy):
    prompts = encode_prompts(policy.tokenizer, TEXTS * 9, 8)
    subject = Subject("tiny", "untrained", policy, {"rule": make_reward("rule", policy, TOY)}, prompts, 2, 5, 5)
    ids, mask, values = sample_scored(subject, "rule", 70, torch.Generator().manual_seed(0))
    assert ids.shape == mask.shape == (70, 5) and values.dtype == torch.float32 and mask.all()
    generator, repeated = torch.Generator().manual_seed(0), prompts.repeat(2)
    for rows in (slice(0, 64), slice(64, 70)):
        drawn, valid = generate(policy, repeated[rows], 5, generator, min_new_tokens=5, stop_early=False)
        assert torch.equal(ids[rows], drawn)
        assert torch.equal(values[rows], subject.rewards["rule"].score(policy, repeated[rows], drawn, valid))
    for n in (0, 3, 74):
        with pytest.raises(InputError, match=f"completions: got {n}; allowed: a positive multiple of group = 2, at"):
            sample_scored(subject, "rule", n, torch.Generator())


# --- the policy of sums ---


def test_the_policy_of_sums_is_right_about_some(tmp_path):
    torch.manual_seed(5)
    state = torch.get_rng_state()
    build_sums(tmp_path / "sums")
    assert torch.equal(torch.get_rng_state(), state)
    written = (tmp_path / "sums" / "model.safetensors").stat().st_mtime_ns
    build_sums(tmp_path / "sums")  # there already
    assert (tmp_path / "sums" / "model.safetensors").stat().st_mtime_ns == written
    sums = load_sums(tmp_path / "sums")
    ids = sums.backbone.tokenizer("12+7=19")["input_ids"]
    assert ids == sums_tokenizer()("12+7=19")["input_ids"] and sums.backbone.tokenizer.decode(ids) == "12+7=19"
    for texts, n in ((sums.train, 2000), (sums.heldout, 500)):
        assert len(texts) == n
        prompts = encode_prompts(sums.backbone.tokenizer, texts[:256], 6)
        rewards = {name: make_reward(name, sums.backbone, TOY) for name in REWARDS["sums"]}
        subject = Subject("sums", "untrained", sums.backbone, rewards, prompts, 4, 3, 0)
        _, _, values = sample_scored(subject, "sums", 1024, torch.Generator().manual_seed(0))
        # What the task is for: neither hopeless nor solved, on prompts that were learned and on others.
        assert 0.05 < values.mean() < 0.95
        assert (values.view(-1, 4).std(1) > 0).any()
