"""Verifiers by hand, called as a trainer calls them."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from grade.errors import InputError
from grade.rewards.functions import FunctionReward, Log, Texts, run_functions
from grade.rewards.verifiers import exact_answer, matches, reasoning_gym, valid_json


def call(verifier, completions, **columns):
    """Through the checks of a reward function; None where it does not apply."""
    texts = Texts(["p"] * len(completions), completions, [[0]] * len(completions), columns)
    values = run_functions([FunctionReward(verifier)], texts, Log(), torch.float32)[0][0].tolist()
    return [None if value != value else value for value in values]


def messages(*contents):
    return [[{"role": "assistant", "content": content}] for content in contents]


@pytest.mark.parametrize(
    ("made", "completions", "answers", "want"),
    [
        (exact_answer(), ["7", " 7\n", "7.0", "77", ""], ["7"] * 5, [1, 1, 0, 0, 0]),
        (exact_answer(), ["7", "x"], [7, None], [1, None]),
        (exact_answer(pattern=r"-?\d+"), ["3 + 4 = 7", "7 is 3 + 4", "-7", ""], ["7", "4", "-7", "7"], [1, 1, 1, 0]),
        (exact_answer(pattern=r"#### (.+)"), ["#### a\n#### 42 ", "42"], ["42", "42"], [1, 0]),
        (exact_answer(pattern=r"(x)?y"), ["y"], ["y"], [0]),
        (exact_answer(ignore_case=True), ["PARIS", "Paris", "Lyon"], ["Paris"] * 3, [1, 1, 0]),
        (exact_answer(), ["PARIS"], ["Paris"], [0]),
        (exact_answer(), messages("7", "8"), ["7", "7"], [1, 0]),
        (exact_answer(), ["2", "2.0", "2.5", "20"], [2.0, 2.0, 2.5, 2.0], [1, 1, 1, 0]),  # of 2 and 2.5 in a column
        (exact_answer(), ["true", "True", "false"], [True, True, True], [1, 1, 0]),
        (exact_answer(pattern="x"), ["2", "true"], [2.0, True], [0, 0]),
        (exact_answer(), ["2", "2.1", "3", "true"], [*np.float32([2, 2.1]), np.int64(3), np.True_], [1, 1, 1, 1]),
        (exact_answer(), ["2", "2.1", "3", "true"], [*torch.tensor([2, 2.1]), torch.tensor(3), torch.tensor(True)],
         [1, 1, 1, 1]),
    ],
)  # fmt: skip
def test_exact_answer(made, completions, answers, want):
    assert call(made, completions, answer=answers) == want


def test_exact_answer_reads_the_column_it_is_told_and_says_which_there_are():
    assert call(exact_answer("solution"), ["1"], solution=["1"]) == [1]
    with pytest.raises(InputError, match="column: got 'answer'; allowed: .*there are: solution$"):
        call(exact_answer(), ["1"], solution=["1"])
    with pytest.raises(InputError, match="none but the prompt"):
        call(exact_answer(), ["1"])


@pytest.mark.parametrize(
    ("pattern", "completions", "want"),
    [
        (r"^\d+$", ["12", "a 12", ""], [0 + 1, 0, 0]),
        (r"(?i)yes", ["oh YES!", "no"], [1, 0]),
        (r"<answer>.*</answer>", messages("<answer>1</answer>", "<answer>\n</answer>"), [1, 0]),
    ],
)
def test_matches(pattern, completions, want):
    assert call(matches(pattern), completions) == want


@pytest.mark.parametrize(
    ("schema", "completions", "want"),
    [
        (None, ['{"a": 1}', "[1, 2]", "1", "{'a': 1}", "", '{"a": 1} and more', "NaN"], [1, 1, 1, 0, 0, 0, 0]),
        ({"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}},
         ['{"n": 1}', '{"n": "1"}', "{}", "[]", "not json"], [1, 0, 0, 0, 0]),
        (False, ["1"], [0]),
        ({}, messages('{"x": null}'), [1]),
        (None, ["[" * 100000], [0]),
    ],
)  # fmt: skip
def test_valid_json(schema, completions, want):
    assert call(valid_json(schema), completions) == want


class Task:
    """Stands for a task of reasoning-gym."""

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01 if answer and entry["metadata"]["partial"] else 0.0


def create_dataset(name, **options):
    if name != "chain_sum":
        raise ValueError(f"Dataset {name!r} not registered")
    return Task()


def test_reasoning_gym_scores_the_rows_entry(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    columns = dict(answer=["7", "7", "7"], metadata=[{"partial": True}] * 2 + [{"partial": False}])
    assert call(reasoning_gym("chain_sum"), [" 7\n", "8", "8"], **columns) == pytest.approx([1, 0.01, 0])
    assert call(reasoning_gym("chain_sum", r"-?\d+"), ["it is 7", "x", "x"], **columns) == [1, 0, 0]
    with pytest.raises(InputError, match="reasoning-gym task: got 'sums'"):
        reasoning_gym("sums")
    with pytest.raises(InputError, match="column: got 'answer'"):
        call(reasoning_gym("chain_sum"), ["7"])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InputError, match="arithmetic"):
        reasoning_gym("chain_sum")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: matches("("), r"pattern: got '\('; allowed: a regular expression"),
        (lambda: matches(None), "pattern: got None"),
        (lambda: valid_json({"type": "objekt"}), "schema: got .*a JSON schema"),
    ],
)
def test_what_cannot_be_verified_is_refused_when_it_is_made(make, match):
    with pytest.raises(InputError, match=match):
        make()
