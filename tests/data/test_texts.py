"""Texts as a source of a reward: what is read and cut, what is scored, and what is refused."""

import pytest
import torch
from conftest import perturb_adapter
from datasets import Dataset
from models.test_prompts import abc_tokenizer

from grade.data import texts as module
from grade.data.texts import read_texts, sample_texts, score_texts
from grade.errors import InputError
from grade.models.batch import PromptBatch
from grade.models.prompts import encode_examples
from grade.rewards.rewards import make_rewards
from grade.training.toy import toy_task

ROWS = [{"prompt": f"Number {n} is", "completion": " good" * (n + 1), "answer": " good good"} for n in range(9)]
P, T = 8, 6


@pytest.fixture(scope="module")
def task():
    task = toy_task()
    perturb_adapter(task.backbone)
    return task


def letters(completions, **_):
    return [float(text.count("o")) if len(text) > 9 else None for text in completions]


def right(completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def score(task, reward=letters, rows=ROWS):
    encode, rows = encoder(task.backbone), list(read_texts(rows, task.backbone.tokenizer, P, T))
    rewards = make_rewards(reward, task.backbone)
    return score_texts(rows, task.backbone, rewards, completion_tokens=T, encode=encode)


def encoder(backbone):
    return lambda rows: encode_examples(backbone.tokenizer, rows, P, "left")


def completions(scored, task):
    pairs = zip(scored.ids, scored.mask, strict=True)
    return [task.backbone.tokenizer.decode(ids[mask.bool()], skip_special_tokens=True) for ids, mask in pairs]


@pytest.mark.parametrize("batch_size", [2, 256])
def test_texts_are_scored_with_their_columns_and_none_is_nan(task, batch_size, monkeypatch):
    monkeypatch.setattr(module, "SCORED", batch_size)
    scored = score(task)
    texts = completions(scored, task)
    assert scored.rewards.dtype == torch.float64 and scored.rewards.isnan().any()
    assert [None if r != r else r for r in scored.rewards.tolist()] == letters(texts)
    scored = score(task, right)
    assert scored.rewards.tolist() == [float(text == " good good") for text in texts]
    assert scored.prompts.examples[3]["answer"] == " good good"


def test_a_completion_ends_where_its_text_does(task):
    scored, end = score(task), task.backbone.eos_token_ids
    for row, (ids, mask) in zip(ROWS, zip(scored.ids, scored.mask, strict=True), strict=True):
        own = task.backbone.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        kept = ids[mask.bool()].tolist()
        assert kept == (own[:T] if len(own) >= T else [*own, kept[-1]])
        assert (kept[-1] in end) == (len(own) < T)


def test_whole_texts_are_cut_into_windows(task):
    tokenizer, end = task.backbone.tokenizer, task.backbone.tokenizer.eos_token_id
    ids = tokenizer(" ".join(task.train_prompts[:6]), add_special_tokens=False)["input_ids"]
    texts = [tokenizer.decode(ids[: 2 * P + T + left]) for left in range(1, T + 1)]
    data = Dataset.from_list([{"text": t, "label": n} for n, t in enumerate(texts)])
    rows = list(read_texts(data, tokenizer, P, T))
    scored = score(task, rows=data)
    completions = PromptBatch(scored.ids, scored.mask).rows()
    for number, text in enumerate(texts):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        starts = [s for s in range(0, len(ids), P + T) if len(ids) - s >= P + 2]
        numbers = [i for i, row in enumerate(rows) if row["label"] == number]
        own = [rows[i] for i in numbers]
        assert [tokenizer.decode(ids[s : s + P]) for s in starts] == [row["prompt"] for row in own]
        wanted = [ids[s + P : s + P + T] for s in starts]
        wanted[-1] += [end] * (len(wanted[-1]) < T)
        assert (end in wanted[-1]) == (number in range(1, T - 1))
        assert [completions[i] for i in numbers] == wanted
    accents = list(read_texts([{"text": "é ü ß " * 60}], tokenizer, 3, 2))  # letters are cut in two
    assert encode_examples(tokenizer, accents, 3).ids.shape == (len(accents), 3)


def test_a_windows_prompt_has_room_for_what_the_tokenizer_puts_first():
    tokenizer = abc_tokenizer("<s> $A")
    rows = list(read_texts([{"text": "a b c " * 20}], tokenizer, 4, 2))
    assert len(rows) == 12 and encode_examples(tokenizer, rows, 4).ids.shape == (12, 4)


def test_sampled_texts_are_completions_of_the_policy_and_of_the_reference_within(task):
    backbone, rewards = task.backbone, make_rewards(letters, task.backbone)
    prompts = encoder(backbone)([{"prompt": text} for text in task.train_prompts[:5]]).repeat(20)

    def draw(seed=0):
        generator = torch.Generator().manual_seed(seed)
        options = dict(completion_tokens=T, generator=generator, min_new_tokens=2)
        return sample_texts(prompts, backbone, rewards, **options)

    own = draw()
    assert len(own) == 100 and torch.equal(own.ids, draw().ids) and not torch.equal(own.ids, draw(1).ids)
    assert [None if r != r else r for r in own.rewards.tolist()] == letters(completions(own, task))
    with backbone.reference():
        reference = draw()
    perturb_adapter(backbone, seed=2)  # the reference has no adapter
    with backbone.reference():
        assert torch.equal(draw().ids, reference.ids) and not torch.equal(own.ids, reference.ids)


@pytest.mark.parametrize(
    ("row", "wrong"), [({"prompt": "a", "answer": 1}, r"\['prompt', 'answer'\]"), ({"completion": "a"}, "completion")]
)
def test_rows_without_the_columns_of_a_text_are_refused(task, row, wrong):
    with pytest.raises(InputError, match=f'texts, row 9: got .*{wrong}.*allowed: "prompt" and "completion", or "text"'):
        score(task, rows=[*ROWS, row])
