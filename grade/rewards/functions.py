"""Reward functions of the user, with TRL's signature.

A function is called by keyword with lists of B entries::

    def reward(prompts, completions, completion_ids, prompt_texts, trainer_state, log_extra, log_metric, **columns):
        return [float(len(text)) for text in completions]  # B numbers; None: not applicable to this row

``prompt_texts``, which TRL has not, are what the completions continue: after a chat template that opens ``<think>``,
the completion itself does not begin with it. ``columns`` are the data set's other columns. ``async def`` works too:
several are awaited concurrently. All functions of a batch get the same lists.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.head import wide
from grade.models.prompts import PromptBatch, decode
from grade.rewards.base import Reward

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

Message = dict[str, Any]
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class Texts:
    """A batch of B completions as text."""

    prompts: list[str | list[Message]]  # strings, or lists of messages ``{"role", "content"}``
    # strings, or for a prompt of messages ``[{"role": "assistant", "content": ...}]``
    completions: list[str | list[Message]]
    completion_ids: list[list[int]]  # token ids without padding; an end-of-sequence token is among them
    prompt_texts: list[str]  # what the model read: cut, with the chat template and special tokens
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
    return Texts(
        asked, completions, PromptBatch(ids, mask).rows(), [tokenizer.decode(row) for row in prompts.rows()], columns
    )


@dataclass
class Log:
    """What functions read of the trainer, and what they log."""

    trainer_state: Any = None  # the trainer's state, passed on
    # from ``log_extra(name, values)``: further columns of the table of completions, a value for each one
    columns: dict[str, list[Any]] = field(default_factory=dict)
    # from ``log_metric(name, value)``: values of each metric
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def arguments(self, texts: Texts) -> dict[str, Any]:
        """Keyword arguments of a function."""
        return texts.columns | {
            "prompts": texts.prompts,
            "completions": texts.completions,
            "completion_ids": texts.completion_ids,
            "prompt_texts": texts.prompt_texts,
            "trainer_state": self.trainer_state,
            "log_extra": partial(self._extra, len(texts.completions)),
            "log_metric": self._metric,
        }

    def _extra(self, size: int, column: str, values: Sequence[Any]) -> None:
        if len(values) != size or column in self.columns:
            raise InputError("log_extra", column, f"a name that is not logged yet, and {size} values")
        self.columns[column] = [value.tolist() if hasattr(value, "tolist") else value for value in values]

    def _metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))


class FunctionReward(Reward):
    """A function of text as a reward: any callable with TRL's signature, sync or async."""

    no_gradient = "a function of text, which has no gradient"

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        inner = getattr(function, "func", function)  # of a partial
        self.function, self.name = function, name or getattr(inner, "__name__", type(inner).__name__)

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B], NaN where the function returned None."""
        texts = decode_texts(policy.tokenizer, prompts, ids, mask)
        return run_functions([self], texts, Log(), wide(policy.dtype))[0][0].to(ids.device)


def run_functions(
    rewards: Sequence[FunctionReward], texts: Texts, log: Log, dtype: torch.dtype
) -> list[tuple[Tensor, float]]:
    """Values [B] of each function, NaN for None, and its seconds: sync ones in order, then async ones concurrently.

    `InputError`, with the function's name, where it raises, or returns anything but B finite numbers or None.
    """
    results: dict[FunctionReward, tuple[Any, float]] = {}

    async def awaited(reward: FunctionReward, result: Awaitable[Any]) -> tuple[Any, float] | BaseException:
        start = time.perf_counter()
        try:
            with _named_errors(reward):
                return await result, time.perf_counter() - start
        except (SystemExit, KeyboardInterrupt) as end:  # raised here, it would end the loop's thread
            return end

    async def gather() -> list[tuple[Any, float] | BaseException]:
        tasks = [awaited(reward, results[reward][0]) for reward in waiting]
        return await asyncio.gather(*tasks, return_exceptions=True)  # none runs on when one fails

    for reward in rewards:
        start = time.perf_counter()
        with _named_errors(reward):
            result = reward.function(**log.arguments(texts))
        results[reward] = result, time.perf_counter() - start
    waiting = [reward for reward in rewards if inspect.isawaitable(results[reward][0])]
    if waiting:
        found = asyncio.run_coroutine_threadsafe(gather(), _loop(os.getpid()))
        try:
            finished = found.result()
        finally:
            found.cancel()  # it ends with the wait for it, as by Ctrl-C
        for outcome in finished:
            if isinstance(outcome, BaseException):
                raise outcome
        results |= dict(zip(waiting, finished, strict=True))
    return [(_values(reward, results[reward][0], len(texts.completions), dtype), results[reward][1])
            for reward in rewards]  # fmt: skip


@cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """An event loop in a thread of its own: it works inside Jupyter's loop, and clients keep their connections."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grade's event loop", daemon=True).start()
    return loop


@contextmanager
def _named_errors(reward: FunctionReward) -> Iterator[None]:
    """What a function raises becomes one line with its name, and the file and line that raised it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        allowed = f"no exception ({error}; {frame.filename}, line {frame.lineno})"
        raise InputError(f"reward {reward.name!r}", type(error).__name__, allowed) from error


def _values(reward: FunctionReward, result: Any, size: int, dtype: torch.dtype) -> Tensor:
    """What a function returned as a tensor [B], NaN for None: a NaN of its own would pass for None."""
    with _named_errors(reward):
        none = torch.tensor([value is None for value in result])
        values = torch.as_tensor([0.0 if value is None else value for value in result], dtype=dtype)
    if values.shape != (size,) or not values.isfinite().all():
        allowed = f"{size} finite numbers, one for each completion, or None where the reward does not apply"
        raise InputError(f"reward {reward.name!r}", result, allowed)
    return values.masked_fill(none, math.nan)
