"""Prompts: from text or messages to left-padded token ids.

A prompt is a row of a dataset: its column "prompt" holds text, taken verbatim, or a list of messages, which the
tokenizer's chat template turns into text; the other columns ride along to the reward. Prompts are padded on the left,
so that every completion starts at the same column and the padding never stands between a prompt and its completion.

Left out: tools and images (which are refused) in messages, and batching (callers slice the rows).
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grade.errors import InputError
from grade.models.batch import PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGES = ("image", "images")
"""Columns with images of the prompt, as in TRL."""
ROW_OPTIONS = ("tools", "chat_template_kwargs")
"""Columns with which TRL's chat templates differ by row."""
Truncation = Literal["error", "left", "right"]


def decode(tokenizer: Any, ids: Tensor, mask: Tensor) -> str:
    """Text of the valid tokens, without special tokens."""
    return tokenizer.decode(ids[mask.bool()].tolist(), skip_special_tokens=True)


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], max_prompt_tokens: int) -> PromptBatch:
    """Tokenise prompts, keep the first ``max_prompt_tokens`` tokens of each, pad them on the left.

    Whether a text begins with BOS is up to the tokenizer; BOS counts as a token. A final EOS is removed, because a
    completion follows. Padding uses the id of the padding token, else of EOS, else 0: it may be a real token's, since
    the mask decides. Ids and mask are int64 [B, P].

    Raises:
        InputError: If a prompt has no text or no tokens.
    """
    rows = [{"prompt": text} for text in texts]
    return replace(encode_examples(tokenizer, rows, max_prompt_tokens, "right", warn_raw=False), examples=None)


def encode_examples(
    tokenizer: PreTrainedTokenizerBase,
    examples: Iterable[Mapping[str, Any]],
    max_prompt_length: int | None = None,
    truncation: Truncation = "error",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    first_row: int = 0,
    warn_raw: bool = True,
) -> PromptBatch:
    """Tokenise rows of a dataset, pad them on the left, keep the rows beside the ids.

    A row's "prompt" is text or a list of messages. Text is encoded as by `encode_prompts`. Messages go through the
    chat template, with the header of the next turn, or, if the last message is the assistant's, with that turn left
    open to be continued; the template alone decides about special tokens, and ``chat_template_kwargs`` are its further
    arguments, such as ``enable_thinking``.

    A prompt of more than ``max_prompt_length`` tokens is an error, or is cut: ``left`` keeps its last tokens (a BOS
    goes too), ``right`` its first. A row with text then has that of the tokens that are left; messages stay whole,
    since a part of a rendered chat is none, and so rewards that read text see all of them. Error messages count rows
    from ``first_row``. Plain text for a tokenizer with a chat template is warned of once per process, if ``warn_raw``.

    Raises:
        InputError: For a row whose prompt is missing, empty, too long or of another type than the first one's.
    """
    examples = list(examples)
    encoded = _token_ids(tokenizer, examples, first_row, dict(chat_template_kwargs or {}), warn_raw)
    for i, ids in enumerate(encoded):
        if max_prompt_length is not None and len(ids) > max_prompt_length:
            if truncation == "error":
                limit = max_prompt_length
                allowed = f"at most {limit} (max_prompt_length); or truncation left, to keep the last {limit}, or right"
                raise InputError(f"tokens of the prompt in row {first_row + i}", len(ids), allowed)
            encoded[i] = ids = ids[-max_prompt_length:] if truncation == "left" else ids[:max_prompt_length]
            if isinstance(examples[i]["prompt"], str):
                examples[i] = {**examples[i], "prompt": tokenizer.decode(ids, skip_special_tokens=True)}
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
    longest, first, rows = (0, 0), 0, iter(dataset)
    while batch := list(itertools.islice(rows, batch_size)):
        encoded = encode_examples(
            tokenizer, batch, max_prompt_length, truncation, chat_template_kwargs, first_row=first, warn_raw=warn_raw
        )
        tokens, row = encoded.mask.sum(1).max(0)
        longest = max(longest, (int(tokens), first + int(row)), key=lambda found: found[0])
        first += len(batch)
    if not first:
        raise InputError("prompts", [], "at least one prompt")
    return longest


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
    tokenizer: Any, examples: Sequence[Mapping[str, Any]], first_row: int, options: dict[str, Any], warn_raw: bool
) -> list[list[int]]:
    """Token ids of each row's prompt, not cut; a text's without a final EOS."""
    prompts = [_prompt_of(example, number) for number, example in enumerate(examples, first_row)]
    messages = not isinstance(prompts[0], str)
    for number, prompt in enumerate(prompts, first_row):
        if isinstance(prompt, str) == messages:
            allowed = f"{'messages' if messages else 'text'}, as in the rows before it"
            raise InputError(f"prompt in row {number}", prompt, allowed)
    if messages:
        template = tokenizer.get_chat_template(options.get("chat_template"))
        for name in options:  # which the template would ignore
            if name != "chat_template" and name not in template:
                raise InputError("chat_template_kwargs", name, "names that the chat template reads")
        encoded = checked = []
        for number, prompt in enumerate(prompts, first_row):
            continued = prompt[-1]["role"] == "assistant"
            try:
                encoded.append(tokenizer.apply_chat_template(
                    readable(tokenizer, prompt, **options), add_generation_prompt=not continued,
                    continue_final_message=continued, return_dict=False, **options,
                ))  # fmt: skip
            except Exception as error:  # the template's own, of jinja's classes
                allowed = f"messages that the chat template accepts ({type(error).__name__}: {error})"
                raise InputError(f"prompt in row {number}", prompt, allowed) from error
    else:
        if options:
            raise InputError("chat_template_kwargs", options, "none: the prompts are text, which no template reads")
        if getattr(tokenizer, "chat_template", None) and warn_raw:
            _warn_of_raw_text()
        # A prompt of special tokens alone is empty, hence both encodings.
        checked = tokenizer(prompts, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
        encoded = tokenizer(prompts, truncation=False, padding=False)["input_ids"]
        encoded = [ids[:-1] if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id else ids for ids in encoded]
    for number, (prompt, ids) in enumerate(zip(prompts, checked, strict=True), first_row):
        if not ids or not (tokenizer.decode(ids, skip_special_tokens=True) if messages else prompt).strip():
            raise InputError(f"prompt in row {number}", prompt, "text (not only white space) of at least one token")
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
    """The prompt of a row: text, or messages of which a template would not leave something out in silence."""
    prompt = example.get("prompt")
    ignored = IMAGES if isinstance(prompt, str) else (*IMAGES, *ROW_OPTIONS)
    for name in ignored:
        if example.get(name):
            allowed = "no such column: the policy reads text, by one template (rename it if only a reward reads it)"
            raise InputError(f"{name} in row {number}", example[name], allowed)
    if not isinstance(prompt, str) and not (prompt and isinstance(prompt, Sequence) and all(map(_is_message, prompt))):
        allowed = 'text, or a list of messages {"role", "content"}, with text or {"type": "text", "text": ...} as parts'
        raise InputError(f"prompt in row {number}", prompt, allowed)
    return prompt


def _is_message(message: Any) -> bool:
    """Whether it has a role and text; content may be missing beside calls of tools: the template knows."""
    if not isinstance(message, Mapping) or "role" not in message:
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or bool(message.get("tool_calls"))


@functools.cache
def _warn_of_raw_text() -> None:
    """Warn, once per process."""
    warnings.warn(
        "the prompts are plain text, but the model's tokenizer has a chat template: the model sees no turns, and may "
        "never end its own; give lists of messages instead, unless the text is to be continued as it stands",
        stacklevel=4,
    )
