"""The gold judge: an independent measure of sentiment that nothing is ever trained against.

A policy that is optimised against a learned reward exploits its errors. The gold judge makes different errors: it is
a linear model of words and word pairs, fitted on reviews that neither the reward models nor the policy see. Where
the reward rises and the gold judge does not, the reward is being exploited (over-optimisation: Gao, Schulman and
Hilton, arXiv 2210.10760). Fitted on the reward models' own split, the same class is their bag-of-words baseline.

Left out: a judge that understands text. This one is right about 9 of 10 whole reviews and 3 of 4 texts of 36 words, so
its scores are averaged over many texts, never used for a single one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from grade.errors import InputError
from grade.files import atomic
from grade.stats import Estimate


@dataclass(frozen=True)
class GoldJudge:
    """TF-IDF of words and word pairs, then logistic regression: ``P(positive) = sigmoid(tfidf(text) . coef + b)``.

    Attributes:
        vectorizer: Text to a row of F features, of length 1: words and pairs, ``1 + log(count)``, times ``idf``.
        coef: Weight of each feature, float64 [F].
        intercept: b.

    >>> judge = GoldJudge.fit(["a good film", "good fun", "a bad film", "bad taste"], [1, 1, 0, 0], n_crops=0)
    >>> judge.score(["good, so good", "bad"]).round(1).tolist()
    [0.8, 0.2]
    """

    vectorizer: TfidfVectorizer
    coef: np.ndarray
    intercept: float

    @classmethod
    def fit(
        cls, texts: Sequence[str], labels: Sequence[int], c: float = 3.0, n_crops: int = 4, seed: int = 0
    ) -> GoldJudge:
        """Fit on whole reviews and on random crops of them.

        The judge scores short texts, and short texts are not short reviews: their TF-IDF rows have fewer, larger
        entries. Crops of 16 to 96 words, half of them from the beginning, teach it that. The features and their idf
        come from the whole reviews, so that a pair still has to occur in 2 reviews and not in 2 crops of one.

        Fitted on 5,902 IMDB reviews and judged on 2,000 validation reviews cut to 24 or 36 words, 4 crops give a
        log-loss of 0.522 or 0.492; without crops (and the c that is then best, 10) it is 0.534 or 0.501. The paired
        standard error is 0.004. Accuracy at 36 words (0.76) and of whole reviews (0.88) does not change measurably.

        Args:
            texts: The reviews.
            labels: 1 positive, 0 negative, as many as ``texts``.
            c: Inverse strength of the L2 penalty.
            n_crops: Crops of every review.
            seed: Seed of the crops.

        Returns:
            The fitted judge.

        Raises:
            InputError: If labels are other than 0 and 1.
            ValueError: If the lengths differ, or no word occurs in two texts.
        """
        texts, labels = list(texts), list(labels)
        if set(labels) != {0, 1}:
            raise InputError("labels", sorted(set(labels)), "both 0 (negative) and 1 (positive), nothing else")
        vectorizer = _vectorizer(min_df=2).fit(texts)
        rng = np.random.default_rng(seed)
        crops = [_crop(text, rng) for _ in range(n_crops) for text in texts]
        features = vectorizer.transform(texts + crops)
        model = LogisticRegression(C=c, solver="liblinear").fit(features, labels * (1 + n_crops))
        return cls(vectorizer, model.coef_[0].astype(np.float64), float(model.intercept_[0]))

    def score(self, texts: Sequence[str]) -> np.ndarray:
        """P(positive) of each text, float64 [n], in (0, 1); a text without any known word gets ``sigmoid(b)``."""
        if len(texts) == 0:
            return np.zeros(0)
        logits = self.vectorizer.transform(texts) @ self.coef + self.intercept
        return expit(logits)

    def accuracy(self, texts: Sequence[str], labels: Sequence[int]) -> Estimate:
        """Share of texts whose more probable label is the given one, with its standard error and n."""
        correct = (self.score(texts) > 0.5) == np.asarray(labels, dtype=bool)
        return Estimate.of(correct)

    def save(self, path: str | Path) -> None:
        """Write the judge to one ``.npz`` file of plain arrays; the same judge gives the same bytes."""
        # Terms hold no line break, and one byte string is far smaller than numpy's fixed-width strings.
        terms = np.frombuffer("\n".join(self.vectorizer.get_feature_names_out()).encode(), dtype=np.uint8)
        intercept = np.float64(self.intercept)
        with atomic(path) as staging, open(staging, "wb") as file:
            np.savez_compressed(file, terms=terms, idf=self.vectorizer.idf_, coef=self.coef, intercept=intercept)

    @classmethod
    def load(cls, path: str | Path) -> GoldJudge:
        """Read a judge that `save` wrote. Nothing is unpickled."""
        with np.load(path, allow_pickle=False) as arrays:
            terms = arrays["terms"].tobytes().decode().split("\n")
            idf, coef, intercept = (arrays[name].astype(np.float64) for name in ("idf", "coef", "intercept"))
        vectorizer = _vectorizer(vocabulary={term: column for column, term in enumerate(terms)})
        vectorizer.idf_ = idf
        return cls(vectorizer, coef, float(intercept))


def _vectorizer(**options: object) -> TfidfVectorizer:
    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, strip_accents="unicode", **options)


def _crop(text: str, rng: np.random.Generator, shortest: int = 16, longest: int = 96) -> str:
    words = text.split()
    length = int(rng.integers(shortest, longest + 1))
    start = int(rng.integers(max(1, len(words) - length + 1))) if rng.random() < 0.5 else 0
    return " ".join(words[start : start + length])
