"""Verifiers: reward functions that check an answer, each made in one line.

    answer = exact_answer("answer", pattern=r"#### (.+)")   # in rewards.py; then reward: rewards.py:answer

Each gives 1 or 0, or None where the row has no answer to compare with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jsonschema import SchemaError
from jsonschema.validators import validator_for
from torch import Tensor

from grade.errors import InputError
from grade.rewards.functions import text_of

Verifier = Callable[..., list[float | None]]
_TRAINERS = ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")


def exact_answer(column: str = "answer", pattern: str | None = None, ignore_case: bool = False) -> Verifier:
    r"""1 where the completion's answer is the row's, without surrounding white space.

    ``column`` of the data set has the right answers; None there: not applicable. Of a number with decimals that is
    whole ``.0`` may be left out, and case does not matter for true and false: a column's type may have added them.
    ``pattern`` is a regular expression that finds the answer in a completion: its last match, the first group if there
    is one; default: all of it.

    >>> exact_answer(pattern=r"-?\d+")(completions=["3 + 4 = 7", "8"], answer=["7", 7])
    [1.0, 0.0]
    """
    find = _finder(pattern)

    def same(text: str, row: dict[str, Any]) -> float | None:
        given, answer = find(text), row[column]
        if answer is None:
            return None
        if given is None:
            return 0.0
        if isinstance(answer, Tensor):  # of a column in torch's format
            answer = answer.cpu().numpy()[()]
        right = str(answer).strip()
        if isinstance(answer, float | np.floating):
            given, right = given.removesuffix(".0"), right.removesuffix(".0")
        if ignore_case or isinstance(answer, bool | np.bool_):
            given, right = given.casefold(), right.casefold()
        return float(given == right)

    return _verifier("exact_answer", same, column)


def matches(pattern: str) -> Verifier:
    r"""1 where a regular expression, as in `re.search`, matches somewhere; flags go inside, as in ``(?i)yes``.

    >>> matches(r"^\d+$")(completions=["12", "twelve"])
    [1.0, 0.0]
    """
    expression = _compiled(pattern)
    return _verifier("matches", lambda text, row: float(expression.search(text) is not None))


def valid_json(schema: dict[str, Any] | bool | None = None) -> Verifier:
    """1 where the completion is JSON, and fits a JSON schema (of the draft that its ``$schema`` names) if one is given.

    >>> valid_json({"required": ["n"]})(completions=['{"n": 1}', "{}", "n = 1"])
    [1.0, 0.0, 0.0]
    """
    schema = True if schema is None else schema
    checker = validator_for(schema)
    try:
        checker.check_schema(schema)
    except SchemaError as error:
        raise InputError("schema", schema, f"a JSON schema ({error.message})") from None
    validator = checker(schema)

    def fits(text: str, row: dict[str, Any]) -> float:
        try:
            return float(validator.is_valid(json.loads(text, parse_constant=_no_constant)))
        except (ValueError, RecursionError):
            return 0.0

    return _verifier("valid_json", fits)


def reasoning_gym(name: str, pattern: str | None = None) -> Verifier:
    """The score in [0, 1] of a reasoning-gym task, such as ``chain_sum``; needs the extra ``arithmetic``.

    The data set's columns are those of reasoning-gym's entries: ``question``, ``answer`` and ``metadata``.
    """
    gym, find = import_reasoning_gym("reward"), _finder(pattern)
    try:
        task = gym.create_dataset(name, size=1, seed=0)
    except ValueError as error:
        raise InputError("reasoning-gym task", name, f"a task of reasoning-gym ({error})") from None

    def score(text: str, row: dict[str, Any]) -> float:
        return float(task.score_answer(find(text), row))

    return _verifier(name, score, "answer", "question", "metadata")


def import_reasoning_gym(field: str) -> Any:
    """The package reasoning-gym, an optional extra; ``field`` is the setting that asks for it."""
    try:
        import reasoning_gym
    except ImportError:
        raise InputError(field, "arithmetic", 'another, or install the extra: pip install -e ".[arithmetic]"') from None
    return reasoning_gym


def _finder(pattern: str | None) -> Callable[[str], str | None]:
    """The answer in a completion; None if there is none."""
    if pattern is None:
        return str.strip
    expression = _compiled(pattern)

    def find(text: str) -> str | None:
        matches = list(expression.finditer(text))
        answer = matches[-1][1 if expression.groups else 0] if matches else None
        return None if answer is None else answer.strip()

    return find


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InputError("pattern", pattern, f"a regular expression ({error})") from None


def _verifier(name: str, check: Callable[[str, dict[str, Any]], float | None], *read: str) -> Verifier:
    """A reward function that checks each text with the columns of its row that it reads; the first must be there."""

    def reward(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        for column in read[:1]:
            if column not in columns:
                there = ", ".join(column for column in columns if column not in _TRAINERS) or "none but the prompt"
                raise InputError(f"reward {name!r}: column", column, f"a column of the data set; there are: {there}")
        known = [column for column in read if column in columns]
        rows = ({column: columns[column][i] for column in known} for i in range(len(completions)))
        return [check(text_of(completion), row) for completion, row in zip(completions, rows, strict=True)]

    reward.__name__ = reward.__qualname__ = name
    return reward


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
