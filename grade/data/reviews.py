"""Labelled reviews: rows of text and label in files, one for each of five disjoint sets."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Literal, NamedTuple

from grade.errors import InputError

Split = Literal["reward", "policy", "validation", "test", "gold"]


class Review(NamedTuple):
    """A text and its label: 1 (positive) or 0 (negative), or, in text of your own, any number."""

    text: str
    label: float


def prompt_text(review: str) -> str:
    """The start of a review that serves as a prompt: two sentences, cut to 200 characters.

    A sentence ends at a full stop, whatever follows, as in GRADE (arXiv 2601.11574). Unlike there, leading full
    stops are dropped first: the two "sentences" of "...well" would both be empty. White space at the end is dropped
    too, because to most tokenizers it is the beginning of the next word. A review of nothing but full stops and white
    space is refused.

    >>> prompt_text("I saw this. Twice. Never again.")
    'I saw this. Twice'
    """
    sentences = review.lstrip(". \t\r\n").split(".")[:2]
    prompt = ".".join(sentences)[:200].strip()
    if not prompt:
        raise InputError("prompt", review, "a text with at least one word")
    return prompt


def load_reviews(data_dir: str | Path, split: Split) -> list[Review]:
    """Read one set, ``<split>.jsonl``, in the order of the file.

    A line needs "text" and "label", a finite number; all else is ignored.
    """
    path, reviews = Path(data_dir) / f"{split}.jsonl", []
    for number, line in enumerate(path.read_text(encoding="utf-8").removesuffix("\n").split("\n"), 1):
        try:
            row = json.loads(line)
            reviews.append(Review(row["text"], finite_number(row["label"])))
        except (ValueError, KeyError, TypeError) as error:
            allowed = '{"label": a finite number, "text": "..."} on every line'
            raise InputError(f"{path}, line {number}", line, allowed) from error
    return reviews


def finite_number(value: float) -> float:
    """A finite number; a whole one as an int, so that 1 and 1.0 are one label and are written alike."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return int(value) if value == int(value) else value
