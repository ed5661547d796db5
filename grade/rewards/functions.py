"""Reward functions of the user, with TRL's signature.

A function is called by keyword with lists of B entries::

    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        return [float(len(text)) for text in completions]  # B numbers; None: not applicable to this row

``columns`` are the data set's other columns. ``async def`` works too: several are awaited concurrently. Whatever goes
wrong in a function or in what it returns is one `InputError` that names function, row and value.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import json
import numbers
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grade.config import LARGEST
from grade.errors import InputError, is_users, reading
from grade.models.background import wait_for
from grade.models.head import wide
from grade.models.prompts import PromptBatch, decode
from grade.rewards.base import Reward

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

Message = dict[str, Any]
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What a function is given beside the columns."""
_MOST_SHOWN = 300  # characters of an exception's text
_RETURNS = "a list (of a tensor its .tolist()) with a finite number, or None, for each completion"


@dataclass(frozen=True)
class Texts:
    """A batch of B completions as text."""

    prompts: list[str | list[Message]]  # strings, or lists of messages ``{"role", "content"}``
    # strings, or for a prompt of messages ``[{"role": "assistant", "content": ...}]``
    completions: list[str | list[Message]]
    completion_ids: list[list[int]]  # token ids without padding; an end-of-sequence token is among them
    columns: dict[str, list[Any]]  # the data set's other columns, each a list


def decode_texts(tokenizer: Any, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Texts:
    """Decode completions [B, T] without special tokens; prompts too, where they have no rows of a data set."""
    examples = prompts.examples
    if examples is None:
        asked, columns = [decode(tokenizer, *pair) for pair in zip(prompts.ids, prompts.mask, strict=True)], {}
    else:
        asked = [example["prompt"] for example in examples]
        names = [name for name in examples[0] if name not in _NOT_COLUMNS]
        columns = {name: [example.get(name) for example in examples] for name in names}
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(asked, [decode(tokenizer, *pair) for pair in zip(ids, mask, strict=True)], strict=True)
    ]
    return Texts(asked, completions, PromptBatch(ids, mask).rows(), columns)


def beginning(completion: str | list[Message], characters: int = 40) -> str:
    """How a completion begins, for error messages."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return repr(text if len(text) <= characters else f"{text[: characters - 3]}...")


@dataclass
class Log:
    """What functions read of the trainer, and what they log."""

    trainer_state: Any = None  # the trainer's state, passed on
    # from ``log_extra(name, values)``: further columns of the table of completions, a value for each one
    columns: dict[str, list[Any]] = field(default_factory=dict)
    # from ``log_metric(name, value)``: values of each metric
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def arguments(self, texts: Texts) -> dict[str, Any]:
        """Keyword arguments of a function: values of its own, which it may change, for each completion."""
        return {
            # One by one, because completions of a prompt share its row.
            **{name: [copy.deepcopy(value) for value in values] for name, values in texts.columns.items()},
            "prompts": [copy.deepcopy(prompt) for prompt in texts.prompts],
            "completions": copy.deepcopy(texts.completions),
            "completion_ids": [list(ids) for ids in texts.completion_ids],
            "trainer_state": self.trainer_state,
            "log_extra": functools.partial(self._extra, len(texts.completions)),
            "log_metric": self._metric,
        }

    def _extra(self, size: int, column: str, values: Sequence[Any]) -> None:
        if not isinstance(column, str) or not isinstance(values, Sequence) or len(values) != size:
            raise InputError(
                "log_extra", f"{column!r}: {values!r}", f"a name, and a list of {size}, one per completion"
            )
        if column in self.columns:
            raise InputError("log_extra", column, "another name: of these completions it is logged already")
        values = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # numpy's and torch's
        with reading("log_extra", column, "text, numbers, or lists and dicts of these, which a checkpoint can hold"):
            json.dumps(values, ensure_ascii=False).encode()
        self.columns[column] = values

    def _metric(self, name: str, value: float) -> None:
        if getattr(value, "ndim", 1) == 0:  # a scalar of torch or numpy
            value = value.item()
        if not isinstance(name, str) or not isinstance(value, numbers.Real):
            raise InputError("log_metric", f"{name!r}: {value!r}", "a name and a number")
        self.metrics[name].append(float(value))


class FunctionReward(Reward):
    """A function of text as a reward: any callable with TRL's signature, sync or async."""

    no_gradient = "a function of text, which has no gradient"

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        inner = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        if not callable(function) or isinstance(function, type):
            raise InputError("reward", function, "a function (or an object that can be called)")
        self.function, self.name = function, name or getattr(inner, "__name__", type(inner).__name__)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__)

    def columns(self) -> set[str]:
        """Columns without which it cannot be called, as far as its signature says."""
        try:
            parameters = inspect.signature(self.function).parameters.values()
        except (TypeError, ValueError):  # of compiled code
            return set()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = {p.name for p in parameters if p.kind in by_name and p.default is p.empty}
        return needed.difference(GIVEN)

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B], NaN where the function returned None."""
        texts = decode_texts(policy.tokenizer, prompts, ids, mask)
        return run_functions([self], texts, Log(), wide(policy.dtype))[0][0].to(ids.device)


def run_functions(
    rewards: Sequence[FunctionReward], texts: Texts, log: Log, dtype: torch.dtype
) -> list[tuple[Tensor, float]]:
    """Values [B] of each function, NaN for None, and its seconds: sync ones in order, then async ones concurrently."""
    results: dict[FunctionReward, tuple[Tensor, float]] = {}

    def checked(reward: FunctionReward, result: Any, start: float) -> tuple[Tensor, float]:
        return _values(reward, result, texts, dtype), time.perf_counter() - start

    async def awaited(reward: FunctionReward) -> tuple[Tensor, float]:
        start = time.perf_counter()
        with _named_errors(reward, texts):
            result = await reward.function(**log.arguments(texts))
        return checked(reward, result, start)

    async def gather(waiting: Sequence[FunctionReward]) -> list[tuple[Tensor, float] | BaseException]:
        return await asyncio.gather(*map(awaited, waiting), return_exceptions=True)  # none runs on when one fails

    for reward in rewards:
        if not reward.is_async:
            start = time.perf_counter()
            with _named_errors(reward, texts):
                result = reward.function(**log.arguments(texts))
            results[reward] = checked(reward, result, start)
    waiting = [reward for reward in rewards if reward.is_async]
    if waiting:
        with _named_errors(waiting[0], texts):
            finished = wait_for(gather(waiting))
        for outcome in finished:
            if isinstance(outcome, BaseException):
                raise outcome
        results |= dict(zip(waiting, finished, strict=True))
    return [results[reward] for reward in rewards]


@contextmanager
def _named_errors(reward: FunctionReward, texts: Texts) -> Iterator[None]:
    """Whatever a function raises becomes one line with its name and the beginning of the batch.

    A working folder that it changed is changed back: the run's own may be relative to it.
    """
    try:
        with chdir("."):
            yield
    except (InputError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # also SystemExit, and a cancelled task
        first = f"row 0 of {len(texts.completions)} begins {beginning(texts.completions[0])}"
        allowed = f"no exception {_told(error)}, but {_RETURNS}; {first}"
        raise InputError(f"reward {reward.name!r}", type(error).__name__, allowed) from error


def _told(error: BaseException) -> str:
    """An exception's text, also of one that cannot write its own, and the innermost line of the user's code."""
    try:
        text = str(error) or "no message"
    except Exception as other:
        text = f"its text raises {type(other).__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f" in {frame.filename}, line {frame.lineno}" for frame in frames if is_users(frame.filename)]
    return f"({text[:_MOST_SHOWN]})" + "".join(lines[-1:])


def _values(reward: FunctionReward, result: Any, texts: Texts, dtype: torch.dtype) -> Tensor:
    """What a function returned, as a tensor [B]; an error names the row."""
    field, size = f"reward {reward.name!r}", len(texts.completions)
    if not isinstance(result, (list, tuple)):
        if inspect.iscoroutine(result):
            result.close()
        raise InputError(field, result, _RETURNS)
    if len(result) != size:
        raise InputError(f"{field}: length of the list", len(result), f"{size}: {_RETURNS}")
    for row, value in enumerate(result):
        if isinstance(value, np.number | np.bool_):  # Python's: 16 bits cannot be compared with the limit
            value = value.item()
        # bool, int, float and the like; of larger ones a mean or a spread is infinite
        if value is not None and not (isinstance(value, numbers.Real) and abs(value) <= LARGEST):
            where = f"{field}, row {row} ({beginning(texts.completions[row])})"
            allowed = f"a finite number of at most {LARGEST:g} in size, or None where the reward does not apply"
            raise InputError(where, value, allowed)
    return torch.tensor([float("nan") if value is None else float(value) for value in result], dtype=dtype)
