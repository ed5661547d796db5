"""Training of reward models on reviews: what a head learns from, and what the report says."""

import math
from functools import cache

import pytest
import torch
from conftest import make_backbone

from grade.data.reviews import Review
from grade.models.prompts import padded
from grade.rewards.fit import RewardConfig, encode, evaluate_reward, train_reward
from grade.rewards.model import HeadSettings, RewardModel


@cache
def backbone():
    """A base whose tokenizer gives a text of n letters the n ids 3, 4, ..., as far as they are asked for."""
    made = make_backbone()

    def tokenize(texts, truncation, max_length):
        return {"input_ids": [[3 + ord(c) - ord("a") for c in t][: max_length if truncation else None] for t in texts]}

    made.tokenizer = tokenize
    return made


REVIEWS = [Review("abcdefghijkl", 1), Review("klmno", 0), Review("aaab", 1), Review("ponmlkjih", 0)]


@pytest.mark.parametrize(("kind", "settings"), [("bag", {}), ("bag", {"pooling": "root"}), ("trunk", {})])
def test_measures_on_held_out_reviews_are_those_of_the_cut_texts(kind, settings):
    torch.manual_seed(0)
    model, labels = RewardModel(kind, backbone(), HeadSettings(**settings)), [1, 0, 1, 0]
    report = evaluate_reward(model, REVIEWS, (2, 6), batch_size=3)
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


def test_the_report_counts_the_reviews_that_were_read():
    more = [*REVIEWS, Review("a" * 9, 2)]  # one that may not be read: its label is neither 0 nor 1
    fit = dict(train_size=4, validation_size=2, epochs=1, min_tokens=4, max_tokens=4)  # one length is a range too
    config = RewardConfig.parse({"bag": fit, "eval_tokens": [4]})
    model, report = train_reward("bag", config, backbone(), more, [*REVIEWS[:2], more[-1]])
    assert (report["train_n"], report["validation_n"], report["epochs"]) == (4, 2, 1)
    assert report["feature_seconds"] >= 0 and report["fit_seconds"] >= 0
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
