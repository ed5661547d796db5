"""Prompts: from text or messages to left-padded token ids.

A prompt is a row of a dataset: its column "prompt" holds text, taken verbatim, or a list of messages, which the
tokenizer's chat template turns into text; the other columns ride along to the reward. Prompts are padded on the left,
so that every completion starts at the same column and the padding never stands between a prompt and its completion.

Left out: tools and images (which are refused) in messages, and batching (callers slice the rows).
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jinja2.meta import find_undeclared_variables
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils.chat_template_utils import _compile_jinja_template

from grade.errors import InputError, reading
from grade.models.batch import PromptBatch, Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGES = ("image", "images")
"""Columns with images of the prompt, as in TRL."""
_OF_TEXTS = {"completion", "completion_ids"}
"""Columns that only some texts have, and no function gets."""
ROW_OPTIONS = ("tools", "chat_template_kwargs")
"""Columns with which TRL's chat templates differ by row."""
_NO_IMAGES = "no such column: the policy reads text alone (another name, where a reward reads it)"
Truncation = Literal["error", "left", "right"]


def decode(tokenizer: Any, ids: Tensor, mask: Tensor) -> str:
    """Text of the valid tokens, without special tokens."""
    return tokenizer.decode(ids[mask.bool()].tolist(), skip_special_tokens=True)


@dataclass(frozen=True)
class ScoredTexts(Rows):
    """N texts with their rewards."""

    prompts: PromptBatch  # with the rows as examples
    ids: Tensor  # completions [N, T], padded on the right
    mask: Tensor  # [N, T]
    rewards: Tensor  # [N] float64, NaN where no function scored

    def __len__(self) -> int:
        """N."""
        return len(self.ids)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_prompt_tokens: int) -> PromptBatch:
    """Tokenise prompts, keep the first ``max_prompt_tokens`` tokens of each, pad them on the left.

    Whether a text begins with BOS is up to the tokenizer; BOS counts as a token. A final EOS is removed, because a
    completion follows. Padding uses the id of the padding token, else of EOS, else 0: it may be a real token's, since
    the mask decides.

    Ids and mask are int64 [B, P]. `InputError` for no prompts, for one without text or without tokens, or if
    ``max_prompt_tokens`` is less than 1.
    """
    if isinstance(texts, str):
        raise InputError("prompts", texts, "a list of texts")
    rows = [{"prompt": text} for text in texts]
    return replace(encode_examples(tokenizer, rows, max_prompt_tokens, "right", warn_raw=False), examples=None)


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Mapping[str, Any]],
    max_prompt_length: int | None = None,
    truncation: Truncation = "error",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    rows: Sequence[int] | None = None,
    *,
    warn_raw: bool = True,
) -> PromptBatch:
    """Tokenise rows of a dataset, pad them on the left, keep the rows beside the ids.

    A row's "prompt" is text or a list of messages. Text is encoded as by `encode_prompts`. Messages go through the
    chat template, with the header of the next turn, or, if the last message is the assistant's, with that turn left
    open to be continued; the template alone decides about special tokens, and ``chat_template_kwargs`` are its further
    arguments, such as ``enable_thinking``.

    A prompt of more than ``max_prompt_length`` tokens is an error, or is cut: ``left`` keeps its last tokens (a BOS
    goes too), ``right`` its first. A row with text then has that of the tokens that are left; messages stay whole,
    since a part of a rendered chat is none, and so rewards that read text see all of them. ``rows`` are the rows'
    numbers in the dataset, for error messages; by default they count from 0. Plain text for a tokenizer with a chat
    template is warned of once per process, if ``warn_raw``.

    `InputError` names the row whose prompt is missing, empty, too long, of another type than the first one's, or
    refused by the chat template.
    """
    if max_prompt_length is not None and max_prompt_length < 1:
        raise InputError("max_prompt_length", max_prompt_length, "a whole number of at least 1, or none")
    if truncation not in get_args(Truncation):
        raise InputError("truncation", truncation, f"one of {', '.join(get_args(Truncation))}")
    examples = list(examples)
    if not examples:
        raise InputError("prompts", [], "at least one prompt")
    numbers = range(len(examples)) if rows is None else rows
    encoded = _token_ids(tokenizer, examples, numbers, dict(chat_template_kwargs or {}), warn_raw)
    for place, (ids, number) in enumerate(zip(encoded, numbers, strict=True)):
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            if truncation == "error":
                limit = max_prompt_length
                allowed = f"at most {limit} (max_prompt_length); or truncation left, to keep the last {limit}, or right"
                raise InputError(f"tokens of the prompt in row {number}", len(ids), allowed)
            ids = ids[-max_prompt_length:] if truncation == "left" else ids[:max_prompt_length]
            encoded[place] = ids
            if isinstance(examples[place]["prompt"], str):
                examples[place] = {**examples[place], "prompt": tokenizer.decode(ids, skip_special_tokens=True)}
    padding = next(token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None)
    # Not `tokenizer.pad`, which needs a padding token.
    return PromptBatch(*padded(encoded, padding, "left"), tuple(examples))


def check_prompts(
    tokenizer: PreTrainedTokenizerBase,
    dataset: Iterable[Mapping[str, Any]],
    max_prompt_length: int | None = None,
    truncation: Truncation = "error",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    warn_raw: bool = True,
    batch_size: int = 1000,
) -> tuple[int, int]:
    """Tokenise each prompt of a dataset once with `encode_examples`, so that a bad row is named before training begins.

    Returns the number of tokens of the longest prompt, after truncation, and its row.
    """
    for name in set(IMAGES).intersection(getattr(dataset, "column_names", None) or ()):
        raise InputError(f"column {name}", "images", _NO_IMAGES)
    dataset = of_columns(dataset, "prompt", *ROW_OPTIONS)
    numbered, longest = iter(enumerate(dataset)), (0, 0)
    first = batch = list(itertools.islice(numbered, 1))
    if not first:
        raise InputError("prompts", [], "at least one prompt")
    while batch:
        numbers, examples = zip(*first, *batch, strict=True)  # the first says whether all are texts or messages
        encoded = encode_examples(
            tokenizer, examples, max_prompt_length, truncation, chat_template_kwargs, numbers, warn_raw=warn_raw
        )
        known = examples[0].keys() - _OF_TEXTS
        for number, example in zip(numbers, examples, strict=True):
            if example.keys() - _OF_TEXTS != known:
                allowed = f"{', '.join(examples[0])}, as in row 0; None where a row has no value"
                raise InputError(f"columns of row {number}", list(example), allowed)
        tokens, place = encoded.mask.sum(1).max(0)
        longest = max(longest, (int(tokens), numbers[place]), key=lambda found: found[0])
        batch = list(itertools.islice(numbered, batch_size))
    return longest


def of_columns(dataset: Any, *names: str) -> Any:
    """A data set with these columns alone, as others may be large; all of it where a transform makes its rows."""
    here = [name for name in names if name in (getattr(dataset, "column_names", None) or ())]
    made = (getattr(dataset, "format", None) or {}).get("type") == "custom"
    return dataset.select_columns(here) if here and not made else dataset


def padded(
    rows: Sequence[Sequence[int]], padding: int = 0, side: str = "right", device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [B, L], L the longest row.

    >>> padded([[5, 6], [7]])
    (tensor([[5, 6],
            [7, 0]]), tensor([[1, 1],
            [1, 0]]))
    """
    ids = [torch.tensor(row, dtype=torch.int64, device=device) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], True, padding_side=side)
    return pad_sequence(ids, True, padding, padding_side=side), mask


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    start = next(i for i in starts if whole[i : i + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]


def position_ids(mask: Tensor) -> Tensor:
    """Positions that count tokens, not padding: ``max(cumsum(mask) - 1, 0)``, int64 [B, L].

    >>> position_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])).tolist()
    [[0, 0, 0, 1], [0, 1, 2, 3]]
    """
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def _token_ids(
    tokenizer: Any, examples: Sequence[Mapping[str, Any]], numbers: Sequence[int], options: dict[str, Any],
    warn_raw: bool,
) -> list[list[int]]:  # fmt: skip
    """Token ids of each row's prompt, not cut; a text's without a final EOS."""
    prompts = [_prompt_of(*pair) for pair in zip(examples, numbers, strict=True)]
    fields, messages = [f"prompt in row {number}" for number in numbers], not isinstance(prompts[0], str)
    for field, prompt in zip(fields, prompts, strict=True):
        if isinstance(prompt, str) == messages:
            raise InputError(field, prompt, f"{'messages' if messages else 'text'}, as in the rows before it")
    template = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if options and not messages:
        raise InputError("chat_template_kwargs", options, "none: the prompts are text, which no template reads")
    if messages and not template:
        raise InputError(fields[0], prompts[0], "text, because the model's tokenizer has no chat template")
    if options:
        with reading("chat_template_kwargs", type(tokenizer).__name__, "a chat template that can be parsed"):
            source = tokenizer.get_chat_template(options.get("chat_template"))
            # In transformers' own environment, whose tags and functions are not jinja's alone.
            read = find_undeclared_variables(_compile_jinja_template(source).environment.parse(source))
        for name in options.keys() - read - {"chat_template"}:
            raise InputError("chat_template_kwargs", name, "names that the chat template reads")
    if messages:
        encoded = checked = []
        for field, prompt in zip(fields, prompts, strict=True):
            continued = prompt[-1]["role"] == "assistant"
            with reading(field, str(prompt), "messages that the chat template accepts"):
                encoded.append(tokenizer.apply_chat_template(
                    readable(tokenizer, prompt, **options), add_generation_prompt=not continued,
                    continue_final_message=continued, return_dict=False, **options,
                ))  # fmt: skip
    else:
        if template and warn_raw:
            _warn_of_raw_text()
        # A prompt of special tokens alone is empty, hence both encodings.
        with reading("tokenizer", type(tokenizer).__name__, "one that encodes the prompts"):
            checked = tokenizer(prompts, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
            encoded = tokenizer(prompts, truncation=False, padding=False)["input_ids"]
        encoded = [ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids for ids in encoded]
    for field, prompt, ids in zip(fields, prompts, checked, strict=True):
        if not ids or not (tokenizer.decode(ids, skip_special_tokens=True) if messages else prompt).strip():
            raise InputError(field, prompt, "text (not only white space) of at least one token")
    for field, ids in zip(fields, encoded, strict=True):
        if max(ids) >= len(tokenizer) and tokenizer.convert_ids_to_tokens(max(ids)) is None:  # its template adds it
            raise InputError(f"token of the {field}", max(ids), f"an id of the tokenizer, below {len(tokenizer)}")
    return encoded


def readable(tokenizer: Any, chat: Sequence[Mapping[str, Any]], **options: Any) -> Sequence[Mapping[str, Any]]:
    """A chat for a tokenizer's template: parts of a message as one text, a line each, where the template knows none.

    Such a template writes a list of parts as Python does.
    """
    parts = [message["content"] for message in chat if isinstance(message.get("content"), list)]
    text = tokenizer.apply_chat_template(chat, tokenize=False, **options) if parts else ""
    unread = [each for each in parts if str(each) in text]
    return [{**message, "content": "\n".join(part["text"] for part in message["content"])}
            if message.get("content") in unread else message for message in chat]  # fmt: skip


def _prompt_of(example: Mapping[str, Any], number: int) -> str | Sequence[Mapping[str, Any]]:
    """The prompt of a row, its type checked."""
    if not isinstance(example, Mapping):
        raise InputError(f"row {number}", example, 'a mapping with a "prompt", such as {"prompt": "..."}')
    if "prompt" not in example:
        raise InputError(f"columns of row {number}", list(example), 'one of them "prompt"')
    for name in IMAGES:
        if example.get(name) is not None:
            raise InputError(f"{name} in row {number}", type(example[name]).__name__, _NO_IMAGES)
    prompt = example["prompt"]
    if isinstance(prompt, str):
        # Half of a surrogate pair, which no tokenizer takes, or what a power cut leaves of a file.
        if re.search("[\0\ud800-\udfff]", prompt):
            raise InputError(f"prompt in row {number}", prompt, "text that UTF-8 can store, without the character NUL")
        return prompt
    if not isinstance(prompt, (list, tuple)):
        raise InputError(f"prompt in row {number}", prompt, 'text, or a list of messages {"role", "content"}')
    for place, message in enumerate(prompt):
        if not _is_message(message):
            field = f"message {place} of the prompt in row {number}"
            raise InputError(
                field, message, '"role" and "content": text, or {"type": "text", "text": ...} as its parts'
            )
    for name in ROW_OPTIONS:
        if example.get(name):
            allowed = "no such column: chat_template_kwargs is a setting (another name, where a reward reads it)"
            raise InputError(f"{name} in row {number}", example[name], allowed)
    if not any(part.strip() if isinstance(part, str) else part for part in (m.get("content") for m in prompt)):
        raise InputError(f"prompt in row {number}", prompt, "messages with text")
    return prompt


def _is_message(message: Any) -> bool:
    """Whether it has a role and says something; content may be missing beside calls of tools: the template knows."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        parts = all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
        return parts and all(isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or bool(message.get("tool_calls"))


@functools.cache
def _warn_of_raw_text() -> None:
    """Warn, once per process."""
    warnings.warn(
        "the prompts are plain text, but the model's tokenizer has a chat template: the model sees no turns, and may "
        "never end its own; give lists of messages instead, unless the text is to be continued as it stands",
        stacklevel=4,
    )
