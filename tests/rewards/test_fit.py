"""Training of reward models: what a head learns from, what the report says, and labels that are any number."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from conftest import make_backbone

from grade.data.reviews import Review
from grade.data.tiny_lm import tiny_model
from grade.models.backbone import Backbone
from grade.models.prompts import padded
from grade.rewards.fit import RewardConfig, encode, evaluate_reward, r2, train_reward
from grade.rewards.model import HeadSettings, RewardModel, load_reward


@cache
def backbone():
    """A base whose tokenizer gives a text of n letters the n ids 3, 4, ..., as far as they are asked for."""
    made = make_backbone()

    def tokenize(texts, truncation, max_length):
        return {"input_ids": [[3 + ord(c) - ord("a") for c in t][: max_length if truncation else None] for t in texts]}

    made.tokenizer = tokenize
    return made


REVIEWS = [Review("abcdefghijkl", 1), Review("klmno", 0), Review("aaab", 1), Review("ponmlkjih", 0)]


@pytest.mark.parametrize(("kind", "settings"), [("bag", {}), ("trunk", {})])
def test_measures_on_held_out_reviews_are_those_of_the_cut_texts(kind, settings):
    torch.manual_seed(0)
    model, labels = RewardModel(kind, backbone(), HeadSettings(**settings)), [1, 0, 1, 0]
    report = evaluate_reward(model, REVIEWS, (2, 6))
    names = ("accuracy_{}", "accuracy_{}_stderr", "log_loss_{}", "mean_score_{}", "calibration_error_{}")
    assert set(report) == {"n", *(name.format(n) for name in names for n in (2, 6))} and report["n"] == 4
    for length in (2, 6):
        scores = model.score_ids(*padded(encode(model.backbone, REVIEWS, length))).tolist()
        right = [(score > 0.5) == bool(label) for score, label in zip(scores, labels, strict=True)]
        nats = [-math.log(score if label else 1 - score) for score, label in zip(scores, labels, strict=True)]
        share = sum(right) / 4
        assert report[f"accuracy_{length}"] == share
        assert report[f"accuracy_{length}_stderr"] == pytest.approx((share * (1 - share) / 4) ** 0.5)
        assert report[f"log_loss_{length}"] == pytest.approx(sum(nats) / 4)
        assert report[f"mean_score_{length}"] == pytest.approx(sum(scores) / 4)


# --- labels that are any number ---

GOOD, BAD = ("fine", "great", "lovely"), ("poor", "dull", "awful")


def stars(n, seed, scale=1.0):
    """Texts of eight words whose label is the number of good words, times a scale, plus 100."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(n):
        good = rng.random(8) < rng.random()
        words = [rng.choice(GOOD if g else BAD) for g in good]
        rows.append(Review(" ".join(words), float(good.sum()) * scale + 100))
    return rows


@pytest.fixture(scope="module")
def base():
    return Backbone(*tiny_model([" ".join((*GOOD, *BAD))] * 20, vocab_size=300, hidden_size=16, layers=1))


def numbers(**changes):
    fit = dict(epochs=40, patience=40, lr=0.03, batch_size=32, min_tokens=8, max_tokens=16, dropout=0.0)
    return RewardConfig.parse({"bag": fit | changes, "trunk": fit, "eval_tokens": [16], "labels": "number"})


@pytest.mark.parametrize("kind", ["bag", "trunk"])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_a_head_learns_numbers_of_any_size(kind, scale, base):
    model, report = train_reward(kind, numbers(), base, stars(200, 0, scale), stars(50, 1, scale))
    test = stars(100, 2, scale)
    measures = evaluate_reward(model, test, [16])
    assert set(report) >= {"validation_mse", "validation_r2"} and "validation_accuracy" not in report
    assert set(measures) == {"n", "r2_16", "r2_16_stderr", "rmse_16", "mean_score_16"}
    assert measures["r2_16"] > 0.8
    labels = np.array([t.label for t in test])
    assert measures["r2_16"] == pytest.approx(1 - measures["rmse_16"] ** 2 / labels.var(), abs=1e-4)
    assert 90 < measures["mean_score_16"] < 100 + 8 * scale, "rewards are in the label's own units"


def test_a_folder_remembers_that_labels_were_numbers(tmp_path, base):
    model, _ = train_reward("bag", numbers(), base, stars(40, 0), stars(20, 1))
    model.save(tmp_path)
    loaded = load_reward(tmp_path, base)
    ids, mask = torch.tensor([[70, 80, 90]]), torch.ones(1, 3)
    assert loaded.labels == "number" and torch.equal(loaded.score_ids(ids, mask), model.score_ids(ids, mask))
    assert float(loaded.score_ids(ids, mask)) > 90


def test_r2_and_its_jackknife_by_leaving_each_row_out():
    rng = np.random.default_rng(0)
    labels = torch.tensor(rng.normal(size=12) * 3 + 5)
    predicted = labels + torch.tensor(rng.normal(size=12))

    def plain(f, y):
        return 1 - ((y - f) ** 2).sum() / ((y - y.mean()) ** 2).sum()

    without = np.array([float(plain(np.delete(predicted, i), np.delete(labels, i))) for i in range(12)])
    stderr = np.sqrt(11 / 12 * ((without - without.mean()) ** 2).sum())
    assert r2(predicted, labels) == pytest.approx((float(plain(predicted, labels)), stderr), rel=1e-12)
