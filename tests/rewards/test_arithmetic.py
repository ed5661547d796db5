"""Arithmetic: prompts, and a reward that only the right answer gets. The verifier itself needs the optional extra."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from grade.errors import InputError
from grade.rewards.arithmetic import Problems
from grade.training.toy import toy_task


class OneDigit:
    """Stands for reasoning-gym's dataset: the same entries and the same verifier's signature."""

    def __init__(self, size, seed, **_):
        sums = [(1, 5), (9, 0), (4, 3)][:size]
        self.entries = [{"answer": str(a + b), "metadata": {"expression": f"{a} + {b}"}} for a, b in sums]

    def __iter__(self):
        return iter(self.entries)

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.1 if answer else 0.0


@pytest.fixture
def problems(monkeypatch):
    fake = SimpleNamespace(create_dataset=lambda name, **options: OneDigit(**options))
    monkeypatch.setitem(sys.modules, "reasoning_gym", fake)
    return Problems.make(3)


@pytest.fixture(scope="module")
def tokenizer():
    return toy_task().backbone.tokenizer


def encode(tokenizer, texts):
    rows = [tokenizer(t, add_special_tokens=False).input_ids for t in texts]
    width = max(map(len, rows))
    ids = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    return ids, torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows])


def test_only_the_first_number_counts_and_only_if_it_is_the_answer(problems, tokenizer):
    prompts = problems.prompts(tokenizer, 64)
    ids, mask = encode(tokenizer, [" 6\n7", " 8 or 9", " seven"])
    assert problems.reward(tokenizer, prompts, ids, mask).tolist() == [1.0, 0.0, 0.0]
    order = torch.tensor([2, 0])  # rows are found by their text, in any order
    shuffled = type(prompts)(prompts.ids[order], prompts.mask[order])
    ids, mask = encode(tokenizer, ["7", "6"])
    assert problems.reward(tokenizer, shuffled, ids, mask).tolist() == [1.0, 1.0]


def test_without_the_extra_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match="arithmetic"):
        Problems.make(3)


@pytest.mark.skipif(not importlib.util.find_spec("reasoning_gym"), reason="needs the extra arithmetic")
def test_the_real_verifier(tokenizer):
    problems = Problems.make(20, seed=3)
    prompts = problems.prompts(tokenizer, 64)
    right = [f" {entry['answer']}\n" for entry in problems.entries]
    wrong = [f" {int(entry['answer']) + 1}" for entry in problems.entries]
    for texts, value in ((right, 1.0), (wrong, 0.0)):
        ids, mask = encode(tokenizer, texts)
        assert problems.reward(tokenizer, prompts, ids, mask).tolist() == [value] * 20


def test_a_prompt_shows_examples_and_may_be_as_long_as_allowed(problems, tokenizer):
    texts = [f"2 + 3 = 5\n7 - 4 = 3\n6 + 1 = 7\n{problem} =" for problem in ("1 + 5", "9 + 0", "4 + 3")]
    longest = max(len(tokenizer(text).input_ids) for text in texts)
    batch = problems.prompts(tokenizer, longest)
    rows = zip(batch.ids, batch.mask, strict=True)
    assert [tokenizer.decode(ids[mask.bool()]) for ids, mask in rows] == texts
    with pytest.raises(InputError, match=f"max_prompt_tokens: got {longest - 1}; allowed: at least {longest}"):
        problems.prompts(tokenizer, longest - 1)
