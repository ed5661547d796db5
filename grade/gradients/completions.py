"""Completions sampled by another engine, read from a text file with one JSON object per line.

Straight-through estimators need only the tokens, not the noise that chose them (`grade.gradients.rollout.condition`),
so any engine may sample: ``replay(..., completions=(ids, mask))`` gives the gradient. Each line has a ``prompt`` and
either ``completion_ids``, the sampled tokens, or ``completion``, text that is tokenised here. Only the ids are exact:
tokenising the text need not give back the tokens that were sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grade.errors import InputError
from grade.gradients.rollout import check_completions
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_prompts


def read_completions(
    path: str | Path, policy: Backbone, max_prompt_tokens: int, max_new_tokens: int | None = None
) -> tuple[PromptBatch, Tensor, Tensor]:
    """Read prompts and completions.

    Args:
        path: The file.
        policy: Its tokenizer reads the text.
        max_prompt_tokens: P; longer prompts are cut.
        max_new_tokens: T; longer completions are cut. None: no limit.

    Returns:
        Prompts, and ids and mask of the completions [B, T], padded on the right.

    Raises:
        InputError: If the file is missing, empty or not UTF-8, if a line is malformed, or if a completion is empty or
            has a token that the policy's tokenizer does not know.
    """
    source = Path(path)
    if not source.is_file():
        raise InputError("completions", str(path), "a file with one JSON object per line")
    try:
        lines = source.read_text(encoding="utf-8").split("\n")  # splitlines() also ends a line at U+2028, in a text
    except UnicodeDecodeError as error:
        raise InputError("completions", str(path), f"text in UTF-8 ({error.reason})") from None
    rows = [_row(line, f"{source.name}, line {n}", policy) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise InputError("completions", str(path), "a file with at least one line")
    prompts = encode_prompts(policy.tokenizer, [prompt for prompt, _ in rows], max_prompt_tokens)
    tokens = [ids[:max_new_tokens] for _, ids in rows]
    ids = torch.zeros(len(rows), max(map(len, tokens)), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, values in enumerate(tokens):
        ids[row, : len(values)], mask[row, : len(values)] = torch.tensor(values), 1
    check_completions(policy, prompts, ids, mask)
    return prompts.to(policy.device), ids.to(policy.device), mask.to(policy.device)


def _row(line: str, place: str, policy: Backbone) -> tuple[str, list[int]]:
    allowed = '{"prompt": text} with "completion": text or "completion_ids": token ids'
    try:
        row: Any = json.loads(line)
    except ValueError:
        raise InputError(place, line[:80], f"a JSON object, {allowed}") from None
    given = {"completion", "completion_ids"} & set(row) if isinstance(row, dict) else set()
    if len(given) != 1 or not isinstance(row.get("prompt"), str):
        raise InputError(place, line[:80], allowed)
    if given == {"completion"}:
        text = row["completion"]
        if not isinstance(text, str):
            raise InputError(f"{place}, completion", text, "text")
        ids = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        unknown = policy.tokenizer.unk_token_id  # some tokenizers use one token for both
        if unknown in ids and unknown not in policy.eos_token_ids:
            raise InputError(f"{place}, completion", text, "text that the policy's tokenizer knows")
    else:
        ids = row["completion_ids"]
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise InputError(f"{place}, completion_ids", ids, "a list of token ids")
    if not ids:
        raise InputError(f"{place}, {given.pop()}", "empty", "at least one token")
    return row["prompt"], ids
