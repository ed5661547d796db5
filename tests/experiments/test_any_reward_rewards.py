"""Rewards of every kind on a toy policy, and the policy of sums: values against naive ones, nothing hidden leaks."""

import json

import pytest
import torch

from grade.errors import InputError
from grade.experiments.any_reward.measure import rewards as module
from grade.experiments.any_reward.measure.rewards import (
    NAMES,
    REWARDS,
    BlackBox,
    Folders,
    length_and_format,
    make_reward,
    read_by,
    right_sum,
    sample_scored,
)
from grade.experiments.any_reward.measure.sums import (
    ANSWER_TOKENS,
    SumsConfig,
    build_sums,
    lines,
    load_sums,
    split_pairs,
    sums_tokenizer,
)
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
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
    assert reward.name == name
    embeds = policy.embed(torch.cat([prompts.ids, ids], 1)).detach().requires_grad_()
    value = reward.differentiable(embeds, torch.cat([prompts.mask, mask], 1))
    torch.testing.assert_close(reward.score(policy, *batch), value.detach())
    torch.testing.assert_close(Objective(reward).score(policy, *batch), value.detach())
    (gradient,) = torch.autograd.grad(value.sum(), embeds)
    assert (gradient[3, prompts.ids.shape[1] :].norm(dim=-1) > 0).tolist() == [True] * 5 + [False] * 3
    assert 0 < value.min() and value.max() < 1 and value.std() > 0
    again = make_reward(name, policy, TOY).score(policy, *batch)
    torch.testing.assert_close(again, reward.score(policy, *batch), rtol=0, atol=0)


def test_the_name_says_the_depth_and_the_base_is_whole_again(policy, batch):
    layers = len(policy.decoder.layers)
    one, every = make_reward("trunk1", policy, TOY), make_reward("trunk", policy, TOY)
    assert (one.function.depth, every.function.depth, len(policy.decoder.layers)) == (1, layers, layers)
    with pytest.raises(InputError, match="'trunk4'; allowed: fewer layers than the base's 2: all of them are `trunk`"):
        make_reward("trunk4", policy, TOY)


def test_another_bases_trunk_reads_the_text_with_its_own_tokenizer(policy, batch, monkeypatch):
    other = toy_task(seed=1, kind="trunk")
    reward = make_reward("smollm2_trunk", policy, TOY)
    got, base = reward.score(policy, *batch), other.backbone
    for text, value in zip(whole_texts(policy, batch), got, strict=True):
        ids = torch.tensor([base.tokenizer(text)["input_ids"]])  # alone, so without padding
        want = other.reward_model(base.embed(ids), torch.ones_like(ids))[0]
        torch.testing.assert_close(value, want)
    assert policy.tokenizer.get_vocab() != base.tokenizer.get_vocab()
    monkeypatch.setattr(module, "BATCH_ROWS", 3)  # 8 texts: two batches and a rest
    texts = decode_texts(policy.tokenizer, *batch)
    parts = read_by(other.reward_model)(prompts=texts.prompts, completions=texts.completions)
    torch.testing.assert_close(torch.tensor(parts), got)


def test_the_gold_judge_reads_prompt_and_completion(policy, batch, tmp_path):
    reviews = toy_reviews(80, seed=5)
    judge = GoldJudge.fit([r.text for r in reviews], [r.label for r in reviews])
    judge.save(tmp_path / "judge.npz")
    got = make_reward("gold", policy, Folders(gold=str(tmp_path / "judge.npz"))).score(policy, *batch)
    assert got.tolist() == pytest.approx(judge.score(whole_texts(policy, batch)))
    assert len(set(make_reward("gold", policy, TOY).score(policy, *batch).tolist())) > 1


def test_the_rule_counts_short_words_and_finished_sentences():
    rule = lambda text: length_and_format([text])[0]  # noqa: E731
    # 3 of 5 words have at most four letters; the last full stop is the 11th of 24 characters.
    assert rule("It was fun. Great acting") == pytest.approx((3 / 5 + 11 / 24) / 2)
    assert rule("  It was fun. Great acting \n") == rule("It was fun. Great acting")
    assert rule("So it is!") == 1.0 and rule("wonderful") == rule("") == 0.0
    assert rule("!!!") == 0.5 and rule("Nearly, though") == 0.0
    assert length_and_format(completions=["a.", "b"], prompts=["x", "y"], answer=[1, 2]) == [1.0, 0.5]


def test_the_rule_reads_the_completion_alone(policy, batch):
    got = make_reward("rule", policy, TOY).score(policy, *batch)
    assert got.tolist() == pytest.approx(length_and_format(decode_texts(policy.tokenizer, *batch).completions))


def test_a_verifier_of_sums_knows_the_answer():
    prompts = ["12+7=", "12+7=", "1+1=", "40+9=", "9+9="]
    assert right_sum(prompts, ["19", "91", "2", "4", ""]) == [1, 0, 1, 0, 0]
    with pytest.raises(InputError, match="^prompt: got '12-7='"):
        right_sum(["12-7="], ["5"])


def test_nothing_of_a_black_box_is_seen_but_its_values(policy, batch):
    for reward in (make_reward("bag", policy, TOY), make_reward("rule", policy, TOY)):
        box = BlackBox(reward)
        assert torch.equal(box.score(policy, *batch), reward.score(policy, *batch)) and box.name == reward.name
        assert box.differentiable is box.reads is box.kind is None and box.parts == (box,)
        assert not box.score(policy, *batch).requires_grad
        with pytest.raises(InputError, match="reward '(bag|rule)'.*a black box: only its values are known"):
            Objective(box).require_gradient("ste")
    with pytest.raises(ValueError, match="scope"):
        Objective(BlackBox(make_reward("bag", policy, TOY)), scope="completion")


def test_every_policy_has_rewards_and_names_are_checked(policy):
    assert set(NAMES) == {"bag", "trunk1", "trunk4", "trunk", "smollm2_trunk", "gold", "rule", "sums"}
    assert "trunk4" not in REWARDS["tiny"] and "smollm2_trunk" not in REWARDS["smollm2"]
    with pytest.raises(InputError, match="reward: got 'bags'; allowed: one of bag, trunk1"):
        make_reward("bags", policy, TOY)


def test_samples_are_those_of_the_policy_group_by_group(policy):
    prompts, reward = encode_prompts(policy.tokenizer, TEXTS * 9, 8), make_reward("rule", policy, TOY)
    draw = lambda n, **options: sample_scored(  # noqa: E731
        policy, reward, prompts, 2, 5, n, torch.Generator().manual_seed(0), **options
    )
    ids, mask, values = draw(70)
    assert ids.shape == mask.shape == (70, 5) and values.shape == (70,) and values.dtype == torch.float32
    generator = torch.Generator().manual_seed(0)
    repeated = prompts.repeat(2)
    for start, stop in ((0, 64), (64, 70)):
        rows = slice(start, stop)
        want, valid = generate(policy, repeated[rows], 5, generator, stop_early=False)
        assert torch.equal(ids[rows], want) and torch.equal(mask[rows], valid)
        assert torch.equal(values[rows], reward.score(policy, repeated[rows], want, valid))
    assert draw(4, min_length=5)[1].all()
    for n in (0, 3, 74):
        with pytest.raises(InputError, match=f"n: got {n}; allowed: a positive multiple of group = 2, at most 72"):
            draw(n)


# --- the policy of sums ---


def test_a_share_of_the_lines_is_wrong_by_one_digit():
    config = SumsConfig(wrong=0.6)
    pairs, heldout = split_pairs(config)
    assert len(pairs) == 2000 and len(heldout) == 500 and set(pairs).isdisjoint(heldout)
    off = []
    for line in lines(config, pairs, 4000):
        asked, given = line.split("=")
        a, b = map(int, asked.split("+"))
        assert (a, b) in set(pairs) if len(off) < 20 else True
        off.append(int(given) - a - b)
    assert set(off) == {-10, -1, 0, 1, 10}
    # Four standard errors of a share of 0.6 at n = 4,000.
    assert sum(map(bool, off)) / len(off) == pytest.approx(0.6, abs=4 * (0.24 / 4000) ** 0.5)
    assert lines(config, [(0, 0)], 200) and all(int(line[4:]) >= 0 for line in lines(config, [(0, 0)], 200))


def test_every_symbol_is_a_token_and_comes_back(tmp_path):
    tokenizer = sums_tokenizer()
    ids = tokenizer("12+7=19")["input_ids"]
    assert len(ids) == 7 and tokenizer.decode(ids) == "12+7=19"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0, 1, 14)
    assert tokenizer.decode([*ids, 0, 0], skip_special_tokens=True) == "12+7=19"


@pytest.fixture(scope="module")
def sums_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies") / "sums"
    build_sums(folder)
    return folder


def test_the_policy_of_sums_is_right_about_some(sums_folder):
    sums = load_sums(sums_folder)
    reward = make_reward("sums", sums.backbone, TOY)
    for texts, n in ((sums.train, 2000), (sums.heldout, 500)):
        assert len(texts) == n
        prompts = encode_prompts(sums.backbone.tokenizer, texts[:256], 6)
        ids, mask, values = sample_scored(
            sums.backbone, reward, prompts, 4, ANSWER_TOKENS, 1024, torch.Generator().manual_seed(0)
        )
        # What the task is for: neither hopeless nor solved, on prompts that were learned and on others.
        assert 0.2 < values.mean() < 0.5
        assert (values.view(-1, 4).std(1) > 0).float().mean() > 0.7
        answers = decode_texts(sums.backbone.tokenizer, prompts.repeat(4), ids, mask).completions
        asked = [sum(map(int, text[:-1].split("+"))) for text in texts[:256] for _ in range(4)]
        assert values.tolist() == [float(text == str(answer)) for text, answer in zip(answers, asked, strict=True)]


def test_the_policy_of_sums_is_written_once_and_loads_like_any_other(sums_folder, tmp_path):
    backbone = Backbone.load(sums_folder)
    assert backbone.tokenizer.get_vocab() == sums_tokenizer().get_vocab() and backbone.eos_token_ids == (0,)
    assert backbone.tokenizer("40+9=")["input_ids"] == sums_tokenizer()("40+9=")["input_ids"]
    assert load_sums(sums_folder).backbone.trainable_parameters() and not backbone.trainable_parameters()
    written = (sums_folder / "model.safetensors").stat().st_mtime_ns
    build_sums(sums_folder)
    assert (sums_folder / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(InputError, match="^folder of sums: .*with the settings"):
        build_sums(sums_folder, SumsConfig(seed=1))
    with pytest.raises(InputError, match="^folder of sums: .*that build_sums wrote"):
        load_sums(tmp_path)


def test_the_policy_of_sums_depends_on_its_seed_alone(tmp_path):
    small = dict(steps=3, batch_size=4, hidden_size=8, layers=1)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build_sums(tmp_path / name, SumsConfig(seed=seed, **small))
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]  # nothing half written is left
    assert json.loads((tmp_path / "a" / "sums.json").read_text())["settings"]["steps"] == 3
