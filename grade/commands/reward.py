"""``python -m grade reward``."""

from __future__ import annotations

import argparse
from typing import get_args

from grade.backbone import Backbone
from grade.commands.options import add_config_options
from grade.gold import GoldJudge
from grade.results import write_metrics
from grade.reviews import load_reviews
from grade.reward import RewardKind
from grade.reward_training import RewardConfig, encode, evaluate_reward, train_reward


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--kind", required=True, choices=get_args(RewardKind), help="bag: embeddings; trunk: all of it")
    parser.add_argument("--backbone", required=True, metavar="DIR", help="folder of the base model")
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the reward model")
    parser.add_argument("--metrics", required=True, metavar="FILE", help="accuracy on the test split")
    add_config_options(parser, RewardConfig)


def run(args: argparse.Namespace) -> None:
    """Train on the reward split, stop early on the validation split, measure on the test split."""
    config = RewardConfig.load(args.config, args.set)
    backbone = Backbone.load(args.backbone)
    splits = {name: load_reviews(args.reviews, name) for name in ("reward", "validation", "test")}
    model, fit = train_reward(args.kind, config, backbone, splits["reward"], splits["validation"])
    test = splits["test"][: getattr(config, args.kind).eval_size]
    metrics = {f"fit/{k}": v for k, v in fit.items()}
    metrics |= evaluate_reward(model, test, config.eval_tokens)
    # The same text, cut at the same token, for a bag of words trained on the same reviews.
    baseline = GoldJudge.fit([r.text for r in splits["reward"]], [r.label for r in splits["reward"]])
    for tokens in config.eval_tokens:
        texts = [backbone.tokenizer.decode(ids) for ids in encode(backbone, test, tokens)]
        accuracy = baseline.accuracy(texts, [r.label for r in test])
        name = f"bag_of_words/accuracy/{tokens}"
        metrics |= {name: accuracy.mean, f"{name}_stderr": accuracy.stderr, f"{name}_n": accuracy.n}
    model.save(args.output_dir)
    write_metrics(args.metrics, metrics)
    for name, value in sorted(metrics.items()):
        print(f"{name} {value:.4g}")
