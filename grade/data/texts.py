"""Texts with rewards: read and cut into prompt and completion, or sampled; then scored.

A text is a prompt with a completion. It comes from

- rows with ``prompt`` and ``completion``, from a file, the hub or memory;
- rows with ``text``: whole texts, cut into windows of a prompt's and a completion's length in the policy's tokens;
- the policy, or within `Backbone.reference` the reference (`sample_texts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from grade.data.prompts import load_rows
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.batch import Completions, PromptBatch
from grade.models.prompts import padded, special_tokens
from grade.models.sampling import generate
from grade.results import progress

DRAWN, SCORED = 128, 256
"""Completions that are drawn, and scored, at once."""
WAIT = 3.0
"""Seconds until a bar appears."""
Row = Mapping[str, Any]
Encode = Callable[[Sequence[Row]], PromptBatch]


def read_texts(
    source: str | Path | Iterable[Row],
    tokenizer: Any,
    prompt_tokens: int,
    completion_tokens: int,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Rows with a prompt, a completion and what other columns there are.

    Rows that have a ``text`` and no ``completion`` are cut into consecutive windows of ``prompt_tokens`` and
    ``completion_tokens`` tokens. Their prompt includes the tokens that the tokenizer puts first. A last piece of fewer
    than ``prompt_tokens + 2`` tokens is dropped. A window's row has ``completion_ids`` as well, with the end of the
    sequence where the text ends.

    ``source`` is rows, a dataset, or a file, folder or hub id as for `grade.data.prompts.load_rows`; of more rows than
    ``limit`` the first ones are taken. `InputError` for a row without these columns.
    """
    texts: list[dict[str, Any]] = []
    for number, row in enumerate(load_rows(source, "texts") if isinstance(source, (str, Path)) else source):
        if limit is not None and len(texts) >= limit:
            break
        if "completion" in row and "prompt" in row:
            completion = row["completion"]  # text, or the assistant's message
            texts.append({**row, "completion": completion if isinstance(completion, str) else completion[0]["content"]})
        elif "text" in row and "completion" not in row:
            texts += _windows(row, tokenizer, prompt_tokens, completion_tokens)
        else:
            raise InputError(f"texts, row {number}", list(row), '"prompt" and "completion", or "text"')
    return texts[:limit]


def _windows(row: Row, tokenizer: Any, prompt: int, completion: int) -> Iterator[dict[str, Any]]:
    """Consecutive windows of a text; those whose prompt is white space are left out."""
    ids = tokenizer(row["text"], add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    prompt -= len(special_tokens(tokenizer)[0])
    end = tokenizer.eos_token_id
    others = {name: value for name, value in row.items() if name != "text"}
    width = prompt + completion
    pieces = [ids[start : start + width] for start in range(0, len(ids), width)]
    pieces = [piece for piece in pieces if len(piece) >= prompt + 2]
    for piece, asked in zip(pieces, _prompts(tokenizer, pieces, prompt), strict=True):
        rest = piece[prompt:]
        answer = tokenizer.decode(rest, skip_special_tokens=True)
        if asked.strip() and answer:
            ended = [end] if len(rest) < completion and end is not None else []
            yield {**others, "prompt": asked, "completion": answer, "completion_ids": rest + ended}


def _prompts(tokenizer: Any, pieces: Sequence[list[int]], most: int) -> list[str]:
    """Texts of windows' prompts, none longer in tokens: a letter that was cut in two may be read back as three."""
    texts = [tokenizer.decode(piece[:most], skip_special_tokens=True) for piece in pieces]
    while texts:
        lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        if max(lengths) <= most:
            break
        texts = [text[length > most :] for text, length in zip(texts, lengths, strict=True)]
    return texts


def score_texts(
    rows: Sequence[Row], backbone: Backbone, rewards: Any, *, completion_tokens: int, encode: Encode
) -> Completions:
    """Rows of `read_texts` as tokens, with rewards, float64, NaN where every function returned None.

    A completion of fewer than T = ``completion_tokens`` tokens gets the end of the sequence; a longer one is cut. A
    row's ``completion_ids`` are taken as they are. ``encode`` makes prompts of rows; columns besides prompt and
    completion reach the reward. Of the policy only the tokenizer matters, and the base whose embeddings a reward reads.
    """
    completions = [_completion_ids(backbone, row, completion_tokens) for row in rows]
    return _scored(backbone, rewards, encode(rows), completions)


@torch.no_grad()
def sample_texts(
    prompts: PromptBatch, backbone: Backbone, rewards: Any | None, *, completion_tokens: int,
    generator: torch.Generator, min_new_tokens: int = 0,
) -> Completions:  # fmt: skip
    """A completion of each prompt by ordinary sampling, with its reward as of `score_texts`; NaN without rewards."""
    drawn: list[list[int]] = []
    for start in progress(range(0, len(prompts), DRAWN), "completions", delay=WAIT):
        batch = prompts[start : start + DRAWN].to(backbone.device)
        pair = generate(backbone, batch, completion_tokens, generator, min_new_tokens=min_new_tokens, inverse=True)
        drawn += PromptBatch(*pair).rows()
    return _scored(backbone, rewards, prompts, drawn)


@torch.no_grad()
def _scored(backbone: Backbone, rewards: Any | None, prompts: PromptBatch, completions: list[list[int]]) -> Completions:
    prompts = prompts.to(backbone.device)
    ids, mask = padded(completions, device=backbone.device)
    values = ids.new_full(ids.shape[:1], torch.nan, dtype=torch.float64)
    for start in progress(range(0, len(ids), SCORED) if rewards is not None else (), "texts scored", delay=WAIT):
        part = slice(start, start + SCORED)
        values[part] = rewards.score(backbone, prompts[part], ids[part], mask[part]).double()
    return Completions(prompts, ids, mask, values)


def _completion_ids(backbone: Backbone, row: Row, most: int) -> list[int]:
    """Tokens of a row's completion, with the end of the sequence where it ends within T = ``most``."""
    tokenizer, ends, known = backbone.tokenizer, backbone.eos_token_ids, row.get("completion_ids")
    if known is None:
        ids = tokenizer(row["completion"], add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    else:
        ids = list(known)
    ids = ids[:most]
    first_end = next((place for place, token in enumerate(ids) if token in ends), None)
    if first_end is not None:
        return ids[: first_end + 1]
    if known is None and len(ids) < most and ends:
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0])
    return ids
