"""Commands that make base models and reward models."""

from __future__ import annotations

import argparse
from typing import get_args

from grade.cli.options import add_config_options
from grade.data.base_model import BackboneConfig, prepare_backbone
from grade.data.reviews import Review, load_reviews
from grade.data.tiny_lm import PretrainConfig, pretrain
from grade.files import check_file, claimed
from grade.models.backbone import Backbone
from grade.results import check_values, write_results
from grade.rewards.fit import RewardConfig, encode, evaluate_reward, train_reward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardKind

REWARD_FILES = ("reward.safetensors", "reward.json")
"""Names that `grade.rewards.model.RewardModel.save` writes."""


def add_backbone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--raw-dir", required=True, metavar="DIR", help="fetched packages")
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the model")
    add_config_options(parser, BackboneConfig)
    parser.set_defaults(execute=_backbone)


def _backbone(args: argparse.Namespace) -> None:
    """Convert the base model."""
    config = BackboneConfig.load(args.config, args.set)
    prepare_backbone(config, args.raw_dir, args.reviews, args.output_dir)
    print(f"wrote {args.output_dir}")


def add_pretrain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the model")
    parser.add_argument("--metrics", required=True, metavar="FILE", help="loss on the test split")
    add_config_options(parser, PretrainConfig)
    parser.set_defaults(execute=_pretrain)


def _pretrain(args: argparse.Namespace) -> None:
    """Train the tiny language model and measure it on the test split."""
    config = PretrainConfig.load(args.config, args.set)
    check_file(args.metrics, "--metrics")
    metrics = pretrain(config, args.reviews, args.output_dir)
    write_results(args.metrics, metrics)
    for name, value in sorted(metrics.items()):
        print(f"{name} {value:.4g}")


def add_reward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kind", required=True, choices=get_args(RewardKind), help="bag: embeddings; trunk: all of it")
    parser.add_argument("--backbone", required=True, metavar="DIR", help="folder of the base model")
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="folder of the reward model")
    parser.add_argument("--metrics", required=True, metavar="FILE", help="accuracy on the test split")
    add_config_options(parser, RewardConfig)
    parser.set_defaults(execute=_reward)


def _reward(args: argparse.Namespace) -> None:
    """Train on the reward split, stop early on the validation split, measure on the test split."""
    config = RewardConfig.load(args.config, args.set)
    check_file(args.metrics, "--metrics")
    with claimed(args.output_dir, REWARD_FILES, inputs=(args.backbone, args.reviews)) as output:
        backbone = Backbone.load(args.backbone)
        splits = {name: load_reviews(args.reviews, name) for name in ("reward", "validation", "test")}
        model, fit = train_reward(args.kind, config, backbone, splits["reward"], splits["validation"])
        test = splits["test"][: getattr(config, args.kind).eval_size]
        metrics = {f"fit/{k}": v for k, v in fit.items()}
        metrics |= evaluate_reward(model, test, config.eval_tokens)
        if config.labels == "binary":
            metrics |= _bag_of_words(backbone, config, splits["reward"], test)
        check_values(metrics)
        with output.replacement() as staging:
            model.save(staging)
    write_results(args.metrics, metrics)
    for name, value in sorted(metrics.items()):
        print(f"{name} {value:.4g}")


def _bag_of_words(
    backbone: Backbone, config: RewardConfig, train: list[Review], test: list[Review]
) -> dict[str, float | int]:
    """Accuracy of a bag of words trained on the same reviews, on the same text cut at the same token."""
    metrics: dict[str, float | int] = {}
    baseline = GoldJudge.fit([r.text for r in train], [r.label for r in train])
    for tokens in config.eval_tokens:
        texts = [backbone.tokenizer.decode(ids) for ids in encode(backbone, test, tokens)]
        accuracy = baseline.accuracy(texts, [r.label for r in test])
        name = f"bag_of_words/accuracy/{tokens}"
        metrics |= {name: accuracy.mean, f"{name}_stderr": accuracy.stderr, f"{name}_n": accuracy.n}
    return metrics
