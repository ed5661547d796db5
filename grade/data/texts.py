"""Texts with rewards: read and cut into prompt and completion, or sampled; then scored.

A text is a prompt with a completion. It comes from

- rows with ``prompt`` and ``completion``, from a file, the hub or memory;
- rows with ``text``: whole texts, cut into windows of a prompt's and a completion's length in the policy's tokens;
- the policy, or within `Backbone.reference` the reference (`sample_texts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
    source: str | Path | Iterable[Row], tokenizer: Any, prompt_tokens: int, completion_tokens: int
) -> Iterator[dict[str, Any]]:
    """Rows with a prompt, a completion and what other columns there are.

    Rows that have a ``text`` and no ``completion`` are cut into consecutive windows of ``prompt_tokens`` and
    ``completion_tokens`` tokens. Their prompt includes the tokens that the tokenizer puts first. A last piece of fewer
    than ``prompt_tokens + 2`` tokens is dropped, and so is a window whose prompt is white space. A window's row has
    ``completion_ids`` as well.

    ``source`` is rows, a dataset, or a file, folder or hub id as for `grade.data.prompts.load_rows`. `InputError` for a
    row without these columns.
    """
    for number, row in enumerate(load_rows(source, "texts") if isinstance(source, (str, Path)) else source):
        if "completion" in row and "prompt" in row:
            completion = row["completion"]  # text, or the assistant's message
            yield {**row, "completion": completion if isinstance(completion, str) else completion[0]["content"]}
        elif "text" in row and "completion" not in row:
            yield from _windows(row, tokenizer, prompt_tokens, completion_tokens)
        else:
            raise InputError(f"texts, row {number}", list(row), '"prompt" and "completion", or "text"')


def _windows(row: Row, tokenizer: Any, most: int, completion: int) -> Iterator[dict[str, Any]]:
    ids = _token_ids(tokenizer, row["text"])
    most -= len(special_tokens(tokenizer)[0])
    for start in range(0, len(ids) - most - 1, most + completion):
        split = start + most
        prompt, rest = tokenizer.decode(ids[start:split], skip_special_tokens=True), ids[split : split + completion]
        while len(_token_ids(tokenizer, prompt)) > most:  # a letter that was cut in two may be read back as three
            prompt = prompt[1:]
        answer = tokenizer.decode(rest, skip_special_tokens=True)
        if prompt.strip() and answer:
            yield {**row, "prompt": prompt, "completion": answer, "completion_ids": rest}


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"]


def score_texts(
    rows: Sequence[Row], backbone: Backbone, rewards: Any, *, completion_tokens: int, encode: Encode
) -> Completions:
    """Rows of `read_texts` as tokens, with rewards, float64, NaN where every function returned None.

    A completion of fewer than T = ``completion_tokens`` tokens gets the end of the sequence; a longer one is cut.
    ``encode`` makes prompts of rows; columns besides prompt and completion reach the reward. Of the policy only the
    tokenizer matters, and the base whose embeddings a reward reads.
    """
    tokenizer, completions = backbone.tokenizer, []
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for row in rows:
        ids = row.get("completion_ids") or _token_ids(tokenizer, row["completion"])
        ids = [*ids, *end][:completion_tokens]
        length = next((place for place, token in enumerate(ids, 1) if token in backbone.eos_token_ids), len(ids))
        completions.append(ids[:length])
    return _scored(backbone, rewards, encode(rows), completions)


@torch.no_grad()
def sample_texts(
    prompts: PromptBatch, backbone: Backbone, rewards: Any | None, *, completion_tokens: int,
    generator: torch.Generator, min_new_tokens: int = 0,
) -> Completions:  # fmt: skip
    """A completion of each prompt by ordinary sampling, with its reward as of `score_texts`, or without rewards."""
    drawn: list[list[int]] = []
    for start in progress(range(0, len(prompts), DRAWN), "completions", delay=WAIT):
        batch = prompts[start : start + DRAWN].to(backbone.device)
        pair = generate(backbone, batch, completion_tokens, generator, min_new_tokens=min_new_tokens)
        drawn += PromptBatch(*pair).rows()
    return _scored(backbone, rewards, prompts, drawn)


@torch.no_grad()
def _scored(backbone: Backbone, rewards: Any | None, prompts: PromptBatch, completions: list[list[int]]) -> Completions:
    texts = Completions(prompts.to(backbone.device), *padded(completions, device=backbone.device))
    if rewards is None:
        return texts
    batches = progress(texts.batches(SCORED), "texts scored", delay=WAIT)
    return replace(texts, rewards=torch.cat([rewards.score(backbone, *batch).double() for batch in batches]))
