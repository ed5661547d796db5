"""Texts as a source of a reward: what is read and cut, that each is scored once, and what is refused."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import perturb_adapter
from datasets import Dataset
from models.test_prompts import abc_tokenizer

from grade.data.texts import read_texts, reference_number, reference_texts, score_texts
from grade.errors import InputError
from grade.models.prompts import encode_examples
from grade.models.samplers import Sampler
from grade.rewards.rewards import make_rewards
from grade.training.toy import toy_task

FUNCTION = """
import letters

def reward(completions, **columns):
    return [float(text.count(letters.CHOSEN)) for text in completions]
"""
WITH_COLUMN = """
def reward(completions, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]
"""
ROWS = [{"prompt": f"Number {n} is", "completion": " good" * (n + 1), "answer": " good good"} for n in range(9)]
P, T = 8, 6


@pytest.fixture(scope="module")
def task():
    task = toy_task()
    perturb_adapter(task.backbone)
    return task


@pytest.fixture
def score(task, tmp_path):
    def score(
        rows=ROWS, code=FUNCTION, letter="o", weight=1.0, length=T, cache=tmp_path / "cache", backbone=task.backbone,
        **options,
    ):  # fmt: skip
        file = tmp_path / "rewards.py"
        file.write_text(code)
        (tmp_path / "letters.py").write_text(f"CHOSEN = {letter!r}\n")
        sys.modules.pop("letters", None)
        rewards = make_rewards(f"{file}:reward", backbone, [weight])
        rows = read_texts(rows, backbone.tokenizer, P, length)
        return score_texts(
            rows, backbone, rewards, completion_tokens=length, encode=encoder(backbone), cache=cache, **options
        )

    return score


def encoder(backbone):
    return lambda rows: encode_examples(backbone.tokenizer, rows, P, "left")


def other_decoder():
    backbone = toy_task().backbone
    backbone.tokenizer.clean_up_tokenization_spaces ^= True
    return backbone


def test_texts_are_scored_once_and_again_when_anything_that_counts_has_changed(score, tmp_path):
    first, second = score(), score()
    assert (first.calls, second.calls) == (9, 0) and first.rewards.dtype == torch.float64
    torch.testing.assert_close(second.rewards, first.rewards, rtol=0, atol=0)
    assert first.rewards.tolist() == [float(p.count("o")) for p in completions(first)]
    changed = [{**row, "completion": row["completion"] + "!"} for row in ROWS]
    for arguments in (
        {"rows": changed},
        {"rows": [{**row, "answer": ""} for row in ROWS]},
        {"code": FUNCTION.replace("float", "-float")},
        {"letter": "g"},
        {"weight": 2.0},
        {"length": T + 1},
        {"backbone": toy_task(seed=1).backbone},
        {"backbone": other_decoder()},
    ):
        assert score(**arguments).calls == 9, arguments
    assert score(cache=None).calls == 9 and score().calls == 0
    for file in Path(tmp_path / "cache").iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="damaged"):
        assert score().calls == 9
    assert score().calls == 0


def test_a_damaged_file_of_scores_is_made_anew(score, tmp_path):
    first = score()
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    for place in range(0, len(whole), 97):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with warnings.catch_warnings(action="ignore"):
            assert score().rewards.tolist() == first.rewards.tolist(), place


QUOTA = """import os
def reward(completions, **_):
    os.environ["QUOTA"] = str(int(os.environ["QUOTA"]) - len(completions))
    if int(os.environ["QUOTA"]) < 0:
        raise RuntimeError("no quota is left")
    return [float(len(text)) for text in completions]
"""


def test_scores_from_before_an_error_are_kept(score, monkeypatch):
    monkeypatch.setenv("QUOTA", "7")
    with pytest.raises(InputError, match="no quota is left"):
        score(code=QUOTA, batch_size=2)
    monkeypatch.setenv("QUOTA", "3")
    scored = score(code=QUOTA, batch_size=2)
    assert scored.calls == 3 and scored.rewards.tolist() == [float(len(text)) for text in completions(scored)]


def completions(scored):
    tokenizer, pairs = toy_task().backbone.tokenizer, zip(scored.ids, scored.mask, strict=True)
    return [tokenizer.decode(ids[mask.bool()], skip_special_tokens=True) for ids, mask in pairs]


def test_scores_of_a_reward_that_cannot_be_seen_are_not_kept(task, tmp_path):
    state = object()
    rewards = make_rewards(lambda completions, **_: [float(state is None) for _ in completions], task.backbone)
    arguments = dict(completion_tokens=T, encode=encoder(task.backbone), cache=tmp_path)
    for _ in range(2):
        with pytest.warns(UserWarning, match="not kept"):
            assert score_texts(ROWS, task.backbone, rewards, **arguments).calls == 9


def test_scores_of_a_model_follow_its_weights_and_not_the_adapter(task, tmp_path):
    rewards = make_rewards(task.reward_model, task.backbone)

    def calls():
        arguments = dict(completion_tokens=T, encode=encoder(task.backbone), cache=tmp_path)
        return score_texts(ROWS, task.backbone, rewards, **arguments).calls

    assert calls() == 9
    perturb_adapter(task.backbone, seed=1)
    assert calls() == 0
    with torch.no_grad():
        task.reward_model.head[-1].bias += 1
    assert calls() == 9


def test_columns_reach_the_reward_and_what_it_misses_is_named(score):
    scored = score(code=WITH_COLUMN)
    assert scored.rewards.tolist() == [float(text == " good good") for text in completions(scored)]
    assert scored.prompts.examples[3]["answer"] == " good good"
    with pytest.raises(InputError, match=r"texts, rows 0 to 8 \(columns prompt, completion\): reward 'reward'.*answer"):
        score([{"prompt": r["prompt"], "completion": r["completion"]} for r in ROWS], WITH_COLUMN)


def test_a_text_without_a_reward_is_nan(score):
    code = "def reward(completions, **_):\n    return [None if len(text) < 9 else 1 for text in completions]\n"
    for _ in range(2):  # scored, and read back
        scored = score(code=code)
        assert scored.rewards.isnan().tolist() == [len(text) < 9 for text in completions(scored)]


def test_a_completion_ends_where_its_text_does(score, task):
    scored, end = score(), task.backbone.eos_token_ids
    for row, (ids, mask) in zip(ROWS, zip(scored.ids, scored.mask, strict=True), strict=True):
        own = task.backbone.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        kept = ids[mask.bool()].tolist()
        assert kept == (own[:T] if len(own) >= T else [*own, kept[-1]])
        assert (kept[-1] in end) == (len(own) < T)


def test_whole_texts_are_cut_into_windows(task):
    tokenizer, end = task.backbone.tokenizer, task.backbone.tokenizer.eos_token_id
    ids = tokenizer(" ".join(task.train_prompts[:6]), add_special_tokens=False)["input_ids"]
    texts = [tokenizer.decode(ids[: 2 * P + T + left]) for left in range(1, T + 1)]
    rows = read_texts(Dataset.from_list([{"text": t, "label": n} for n, t in enumerate(texts)]), tokenizer, P, T)
    for number, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        starts = [s for s in range(0, len(ids), P + T) if len(ids) - s >= P + 2]
        own = [row for row in rows if row["label"] == number]
        assert [tokenizer.decode(ids[s : s + P]) for s in starts] == [row["prompt"] for row in own]
        wanted = [ids[s + P : s + P + T] for s in starts]
        wanted[-1] += [end] * (len(wanted[-1]) < T)
        assert (end in wanted[-1]) == (number in range(1, T - 1))
        assert [row["completion_ids"] for row in own] == wanted
    assert len(read_texts([{"text": t} for t in texts], tokenizer, P, T, limit=9)) == 9
    accents = read_texts([{"text": "é ü ß " * 60}], tokenizer, 3, 2)  # letters are cut in two
    assert encode_examples(tokenizer, accents, 3).ids.shape == (len(accents), 3)


def test_a_windows_prompt_has_room_for_what_the_tokenizer_puts_first():
    tokenizer = abc_tokenizer("<s> $A")
    rows = read_texts([{"text": "a b c " * 20}], tokenizer, 4, 2)
    assert len(rows) == 12 and encode_examples(tokenizer, rows, 4).ids.shape == (12, 4)


def test_completions_of_the_reference_are_drawn_once(task, tmp_path):
    drawn = []

    class Counting(Sampler):
        def sample(self, *arguments):
            drawn.append(super().sample(*arguments))
            return drawn[-1]

    prompts, backbone = [{"prompt": text, "number": n} for n, text in enumerate(task.train_prompts[:4])], task.backbone
    settings = dict(completion_tokens=T, encode=encoder(backbone), cache=tmp_path)
    rows = reference_texts(prompts, 10, backbone, Counting("own"), **settings)
    perturb_adapter(backbone, seed=2)  # the reference has no adapter
    again = reference_texts(prompts, 10, backbone, Counting("own"), **settings)
    assert again == rows and len(rows) == 10 and len(drawn) == 1
    assert sorted(row["number"] for row in rows)[::5] == [0, 2] and len({row["number"] for row in rows[:4]}) == 4
    assert reference_texts(prompts, 10, backbone, Counting("own"), **{**settings, "cache": None}) == rows
    assert reference_texts(prompts, 10, backbone, Counting("own"), **settings, seed=1) != rows and len(drawn) == 3
    assert reference_number("reference:4096") == 4096 and reference_number("texts.jsonl") is None


def test_completions_that_the_reference_would_not_sample_are_refused_and_not_kept(task, tmp_path):
    """Of a sampler elsewhere, which may have another base; here one that gives the policy's."""

    class Adapted(Sampler):
        def sample(self, backbone, *arguments):
            backbone.peft.enable_adapter_layers()
            try:
                return super().sample(backbone, *arguments)
            finally:
                backbone.peft.disable_adapter_layers()

    prompts, backbone = [{"prompt": text} for text in task.train_prompts[:4]], task.backbone
    settings = dict(completion_tokens=T, encode=encoder(backbone), cache=tmp_path)
    with pytest.raises(InputError, match="sampler: largest difference: .* sampler_max_difference = 0.05 .* elsewhere"):
        reference_texts(prompts, 10, backbone, Adapted("elsewhere"), **settings)
    assert not list(tmp_path.iterdir())
    reference_texts(prompts, 10, backbone, Sampler("elsewhere"), **settings)
    assert len(reference_texts(prompts, 10, backbone, Adapted("elsewhere"), **settings, max_difference=9.0)) == 10


BAD = {
    "few": (ROWS[:3], "texts: got '3 from texts'; allowed: at least 8"),
    "empty": ([{**ROWS[0], "completion": "  "}, *ROWS], "completion in row 0: got ' '"),
    "columns": ([*ROWS, {"prompt": "a", "answer": 1}], 'columns of texts, row 9.*allowed: "prompt" and "completion"'),
    "prompt": ([*ROWS, {**ROWS[0], "prompt": ""}], "prompt in row 9: got ''"),
    "text": ([{"text": 3}], "text in row 0: got 3"),
    "short": ([{"text": "ab"}], "texts: got '0 from texts'; allowed: at least 8 texts .of a prompt of 8 tokens"),
    "file": ("missing.jsonl", "texts: got 'missing.jsonl'; allowed: a file that exists"),
    "columns alone": ({"text": ["a"]}, "texts: got 'dict'; allowed: a file, a hub id, or rows"),
    "text alone": (["a text"] * 9, "row 0 of texts: got 'a text'; allowed: a mapping"),
    "no token": ([*ROWS, {**ROWS[0], "completion_ids": [-1]}], "completion in row 9: got"),
    "no number": ([*ROWS, {**ROWS[0], "completion_ids": "ab"}], "row 9: got 'ab'; allowed: completion_ids"),
}


@pytest.mark.parametrize(("rows", "message"), BAD.values(), ids=BAD)
def test_bad_texts(score, rows, message):
    with pytest.raises(InputError, match=message):
        score(rows)
