"""The gold judge: what it learns, that a saved one is the same, and what it refuses."""

import math

import numpy as np
import pytest

from grade.errors import InputError
from grade.rewards.gold import GoldJudge

GOOD, BAD = ("superb", "moving", "delightful"), ("dull", "awful", "clumsy")


def make_reviews(n=200, seed=0, words=40):
    """Neutral words with three telling ones at the end of each text."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for i in range(n):
        neutral = [f"word{rng.integers(50)}" for _ in range(words)]
        texts.append(" ".join(neutral + list(rng.choice(GOOD if i % 2 else BAD, 3))))
        labels.append(i % 2)
    return texts, labels


@pytest.fixture(scope="module")
def judge():
    return GoldJudge.fit(*make_reviews())


def test_it_learns_what_separates_the_labels(judge):
    texts, labels = make_reviews(n=100, seed=1)
    accuracy = judge.accuracy(texts, labels)
    assert accuracy.mean > 0.95 and accuracy.n == 100
    assert judge.accuracy(texts, [1 - label for label in labels]).mean == pytest.approx(1 - accuracy.mean)


def test_the_score_is_the_written_formula():
    # Words a (both texts of label 1 and one of label 0) and b, without pairs in common:
    # idf = log((1 + 4) / (1 + df)) + 1, rows are scaled to length 1, and 1 + log(2) counts a word that comes twice.
    judge = GoldJudge.fit(["aa xx", "aa yy", "bb zz", "bb aa"], [1, 1, 0, 0], n_crops=0)
    assert judge.vectorizer.get_feature_names_out().tolist() == ["aa", "bb"]
    idf = [math.log(5 / 4) + 1, math.log(5 / 3) + 1]
    a, b = (1 + math.log(2)) * idf[0], idf[1]
    norm = math.hypot(a, b)
    logit = (a * judge.coef[0] + b * judge.coef[1]) / norm + judge.intercept
    assert judge.score(["aa bb aa"])[0] == pytest.approx(1 / (1 + math.exp(-logit)), rel=1e-12)
    assert judge.score(["unknown"])[0] == pytest.approx(1 / (1 + math.exp(-judge.intercept)), rel=1e-12)


def test_pairs_that_only_repeat_within_the_crops_of_one_review_are_no_features():
    texts, labels = make_reviews(n=20)
    texts[0] += " unique phrase"
    terms = set(GoldJudge.fit(texts, labels, n_crops=8).vectorizer.get_feature_names_out())
    assert not {"unique", "phrase", "unique phrase"} & terms and "word1" in terms


def test_a_crop_has_the_label_of_its_review():
    """A text of fewer words than the shortest crop is its own crop: with 3 crops each text counts four times."""
    texts, labels = make_reviews(n=40, words=5)
    four, one = GoldJudge.fit(texts, labels, c=1.0, n_crops=3), GoldJudge.fit(texts, labels, c=4.0, n_crops=0)
    assert np.abs(one.coef).max() > 1
    assert four.coef == pytest.approx(one.coef, abs=0.02)  # the solver's tolerance


def test_a_saved_judge_is_the_same_and_so_are_its_bytes(judge, tmp_path):
    judge.save(tmp_path / "new" / "judge.npz")
    loaded = GoldJudge.load(tmp_path / "new" / "judge.npz")
    texts, _ = make_reviews(n=50, seed=3)
    assert loaded.score(texts).tolist() == judge.score(texts).tolist()
    loaded.save(tmp_path / "again.npz")
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "new" / "judge.npz").read_bytes()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["judge.npz"]


@pytest.mark.parametrize("labels", [[0, 2], [0.3, 1], [1, 1]])
def test_labels_other_than_0_and_1_are_refused(labels):
    with pytest.raises(InputError, match="^labels: "):
        GoldJudge.fit(["a b", "a c"], labels)
