"""Commands that make a reward model, and the judge that training never sees."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from grade.cli.options import command, option, print_metrics
from grade.config_files import load_config
from grade.data.reviews import load_reviews
from grade.models.backbone import Backbone
from grade.results import write_metrics, write_results
from grade.rewards.fit import RewardConfig, encode, evaluate_reward, train_reward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardKind

WORDS = (36, 128, None)
"""Lengths at which the judge is measured: about a prompt and a completion, a paragraph, the whole review."""


@command("gold", reviews="review splits", output_dir="judge.npz is written here", metrics="accuracy on the test split")
def _gold(args: argparse.Namespace) -> None:
    """Fit on the gold split, measure on the test split."""
    gold, test = load_reviews(args.reviews, "gold"), load_reviews(args.reviews, "test")
    judge = GoldJudge.fit([r.text for r in gold], [r.label for r in gold])
    metrics = {"fit/n": len(gold)}
    for words in WORDS:
        texts = [" ".join(r.text.split()[:words]) for r in test]
        accuracy = judge.accuracy(texts, [r.label for r in test])
        metrics |= accuracy.metrics(f"accuracy/{words or 'all'}_words")
        print(f"gold judge, {words or 'all'} words: accuracy {accuracy}")
    judge.save(Path(args.output_dir, "judge.npz"))
    write_metrics(args.metrics, metrics)


@command(
    "reward",
    option("--kind", required=True, choices=get_args(RewardKind), help="bag: embeddings; trunk: all of it"),
    backbone="folder of the base model",
    reviews="review splits",
    output_dir="folder of the reward model",
    metrics="accuracy on the test split",
    config=RewardConfig,
)
def _reward(args: argparse.Namespace) -> None:
    """Train on the reward split, stop early on the validation split, measure on the test split."""
    config = load_config(RewardConfig, args.config, args.set)
    backbone = Backbone.load(args.backbone)
    train, validation, test = (load_reviews(args.reviews, name) for name in ("reward", "validation", "test"))
    model, fit = train_reward(args.kind, config, backbone, train, validation)
    test = test[: getattr(config, args.kind).eval_size]
    metrics = {f"fit/{k}": v for k, v in fit.items()} | evaluate_reward(model, test, config.eval_tokens)
    if config.labels == "binary":  # against a bag of words of the same reviews, cut at the same token
        baseline = GoldJudge.fit([r.text for r in train], [r.label for r in train])
        for tokens in config.eval_tokens:
            texts = [backbone.tokenizer.decode(ids) for ids in encode(backbone, test, tokens)]
            accuracy = baseline.accuracy(texts, [r.label for r in test])
            metrics |= accuracy.metrics(f"bag_of_words/accuracy/{tokens}")
    model.save(args.output_dir)
    write_results(args.metrics, metrics)
    print_metrics(metrics)
