"""Reward functions of the user, with TRL's signature.

A function is called by keyword with lists of B entries::

    def reward(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        return [float(len(text)) for text in completions]  # B numbers; None: not applicable to this row

``columns`` are the data set's other columns. ``async def`` works too: several are awaited concurrently. Whatever goes
wrong in a function or in what it returns is one `InputError` that names function, row and value.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import numbers
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grade.errors import InputError
from grade.rewards.text import Texts, beginning, decode_texts

if TYPE_CHECKING:
    from grade.models.prompts import PromptBatch

_RETURNS = "a list with a finite number, or None, for each completion"
_MOST_SHOWN = 300  # characters of an exception's text
_SKIPPED = float("nan")  # where a function does not apply


@dataclass
class Log:
    """What functions log, and what they are told of the trainer.

    Attributes:
        trainer_state: The trainer's state, passed on.
        columns: From ``log_extra(name, values)``: further columns of the table of completions.
        metrics: From ``log_metric(name, value)``: values of each metric.
    """

    trainer_state: Any = None
    columns: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def extra(self, column: str, values: list[Any]) -> None:
        """Add a column to the table of completions, one value for each completion."""
        self.columns[column].extend(values)

    def metric(self, name: str, value: float) -> None:
        """Log a number."""
        self.metrics[name].append(value)


class FunctionReward:
    """A function of text as a reward.

    Args:
        function: A function, or any callable, with TRL's signature; sync or async.
        tokenizer: The policy's, to decode completions.
        name: How it is logged; default: the function's own name.
        dtype: Type of the rewards.

    Raises:
        InputError: If it is not callable, or there is no tokenizer.
    """

    no_gradient = "a function of text, which has no gradient"

    def __init__(
        self, function: Callable[..., Any], tokenizer: Any, name: str | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        inner = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        if not callable(function) or isinstance(function, type):
            raise InputError("reward", function, "a function (or an object that can be called)")
        self.function, self.tokenizer, self.dtype = function, tokenizer, dtype
        self.name = name or getattr(inner, "__name__", type(inner).__name__)
        self.is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(inner.__call__)
        if tokenizer is None:
            raise InputError("tokenizer", None, f"the policy's tokenizer: reward {self.name!r} reads text")

    def score(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B], NaN where the function returned None."""
        texts = decode_texts(self.tokenizer, prompts, ids, mask)
        return run_functions([self], texts, Log())[0][0].to(ids.device)

    def arguments(self, texts: Texts, log: Log) -> dict[str, Any]:
        """Keyword arguments of the function; lists of its own, which it may change."""
        return {
            **{name: list(values) for name, values in texts.columns.items()},
            "prompts": list(texts.prompts),
            "completions": list(texts.completions),
            "completion_ids": [list(ids) for ids in texts.completion_ids],
            "trainer_state": log.trainer_state,
            "log_extra": log.extra,
            "log_metric": log.metric,
        }

    def failed(self, error: BaseException, texts: Texts) -> InputError:
        """The error for an exception in the function."""
        said = str(error)[:_MOST_SHOWN] or "no message"
        first = f"row 0 of {len(texts)} begins {beginning(texts.completions[0])}"
        allowed = f"no exception ({said}), but {_RETURNS}; {first}"
        return InputError(f"reward {self.name!r}", type(error).__name__, allowed)

    def checked(self, result: Any, texts: Texts) -> Tensor:
        """What the function returned, as a tensor [B].

        Raises:
            InputError: If it is not a list of B finite numbers or None; names the row.
        """
        if isinstance(result, Tensor):
            kind = "a tensor with gradient, which would be lost" if result.requires_grad else "a tensor"
            raise InputError(f"reward {self.name!r}", kind, f"{_RETURNS}: use .tolist()")
        if not isinstance(result, (list, tuple)):
            if inspect.iscoroutine(result):
                result.close()
            raise InputError(f"reward {self.name!r}", result, _RETURNS)
        if len(result) != len(texts):
            allowed = f"{len(texts)}: {_RETURNS}"
            raise InputError(f"reward {self.name!r}: length of the list", len(result), allowed)
        for row, value in enumerate(result):
            if value is not None and not _is_finite(value, self.dtype):
                where = f"reward {self.name!r}, row {row} ({beginning(texts.completions[row])})"
                raise InputError(where, value, "a finite number, or None where the reward does not apply")
        return torch.tensor([_SKIPPED if v is None else float(v) for v in result], dtype=self.dtype)


def run_functions(rewards: Sequence[FunctionReward], texts: Texts, log: Log) -> list[tuple[Tensor, float]]:
    """Call functions on a batch: first sync ones in order, then async ones concurrently.

    Args:
        rewards: The functions.
        texts: B completions.
        log: Takes what they log.

    Returns:
        For each function its values [B], NaN for None, and its seconds.

    Raises:
        InputError: From the first function that fails.
    """
    results: dict[int, tuple[Tensor, float]] = {}
    for index, reward in enumerate(rewards):
        if not reward.is_async:
            start = time.perf_counter()
            try:
                result = reward.function(**reward.arguments(texts, log))
            except InputError:
                raise
            except (Exception, SystemExit) as error:
                raise reward.failed(error, texts) from error
            results[index] = reward.checked(result, texts), time.perf_counter() - start
    waiting = {index: reward for index, reward in enumerate(rewards) if reward.is_async}
    if waiting:

        async def gather() -> list[tuple[Tensor, float] | BaseException]:
            calls = (_awaited(reward, texts, log) for reward in waiting.values())
            return await asyncio.gather(*calls, return_exceptions=True)  # none is left running when one fails

        finished = asyncio.run_coroutine_threadsafe(gather(), _event_loop()).result()
        for outcome in finished:
            if isinstance(outcome, BaseException):
                raise outcome
        results |= dict(zip(waiting, finished, strict=True))
    return [results[index] for index in range(len(rewards))]


async def _awaited(reward: FunctionReward, texts: Texts, log: Log) -> tuple[Tensor, float]:
    start = time.perf_counter()
    try:
        result = await reward.function(**reward.arguments(texts, log))
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise reward.failed(error, texts) from error
    return reward.checked(result, texts), time.perf_counter() - start


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own: it works inside Jupyter's loop, and clients keep their connections."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop


def _is_finite(value: Any, dtype: torch.dtype) -> bool:
    if isinstance(value, numbers.Real):  # bool, int, float and numpy's numbers; too large a number is infinite
        return abs(value) <= torch.finfo(dtype).max
    return isinstance(value, np.bool_)
