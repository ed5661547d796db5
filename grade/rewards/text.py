"""Completions as text, the way reward functions and classifiers of text receive them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from grade.models.prompts import PromptBatch


Message = dict[str, Any]
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


@dataclass(frozen=True)
class Texts:
    """A batch of completions as text, B rows.

    Attributes:
        prompts: Strings, or lists of messages ``{"role", "content"}``.
        completions: Strings, or for a prompt of messages ``[{"role": "assistant", "content": ...}]``.
        completion_ids: Token ids without padding; an end-of-sequence token is among them.
        columns: The data set's other columns, each a list.
    """

    prompts: list[str | list[Message]]
    completions: list[str | list[Message]]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.completions)


def decode_texts(tokenizer: Any, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Texts:
    """Decode completions, without special tokens.

    Args:
        tokenizer: The policy's.
        prompts: B prompts. Without their data set's rows, their text is decoded too.
        ids: Completions [B, T].
        mask: [B, T].

    Returns:
        The texts.
    """
    rows = _valid(ids, mask)
    examples = prompts.examples
    if examples is None:
        asked, columns = [_text(tokenizer, row) for row in _valid(prompts.ids, prompts.mask)], {}
    else:
        asked = [example["prompt"] for example in examples]
        names = [name for name in examples[0] if name not in _NOT_COLUMNS]
        columns = {name: [example.get(name) for example in examples] for name in names}
    answers = [_text(tokenizer, row) for row in rows]
    completions = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(asked, answers, strict=True)
    ]
    return Texts(asked, completions, rows, columns)


def text_of(completion: str | list[Message]) -> str:
    """The text of a completion.

    >>> text_of([{"role": "assistant", "content": "7"}]), text_of("7")
    ('7', '7')
    """
    return completion if isinstance(completion, str) else completion[-1]["content"]


def beginning(completion: str | list[Message], characters: int = 40) -> str:
    """How a completion begins, for error messages."""
    text = text_of(completion)
    return repr(text if len(text) <= characters else f"{text[: characters - 3]}...")


def _valid(ids: Tensor, mask: Tensor) -> list[list[int]]:
    pairs = zip(ids.tolist(), mask.tolist(), strict=True)
    return [[token for token, valid in zip(*pair, strict=True) if valid] for pair in pairs]


def _text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)
