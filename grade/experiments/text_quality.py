"""What completions are like, beside their reward: an outside judge, and diversity.

A policy that is pushed far from its reference may say the same again and again: distinct-n falls. It depends on how
many completions are looked at and how long they are: compare only at equal n and length.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from grade.errors import InputError


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct-n (Li et al. 2016, arXiv:1510.03055): different n-grams of lower-case words over all, or 0.

    >>> distinct_n(["a b a b", "A b"], 1), distinct_n(["a b a b", "A b"], 2)
    (0.3333333333333333, 0.5)
    """
    words = [text.lower().split() for text in texts]
    grams = [tuple(row[i : i + n]) for row in words for i in range(len(row) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


@functools.cache
def _lexicon() -> Any:
    try:
        from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
    except ModuleNotFoundError:
        raise InputError("outside judge", "vaderSentiment", "an installed package: pip install -e '.[test]'") from None
    return SentimentIntensityAnalyzer()


def outside(texts: Sequence[str]) -> np.ndarray:
    """Sentiment [n] in -1..1 by a judge to which nothing here was fitted: VADER's lexicon and its rules.

    Hutto and Gilbert 2014, ``vaderSentiment``; it knows words like "not", "but" and "very".

    >>> outside(["A wonderful film.", "Not a wonderful film.", "A film."]).round(2).tolist()
    [0.57, -0.46, 0.0]
    """
    return np.array([_lexicon().polarity_scores(text)["compound"] for text in texts])


def qualities(texts: Sequence[str]) -> dict[str, float]:
    """What texts are like on average: ``outside``'s sentiment, ``distinct`` bigrams, ``length`` in words."""
    words = sum(len(text.split()) for text in texts)
    return {"outside": outside(texts).mean(), "distinct": distinct_n(texts, 2), "length": words / len(texts)}
