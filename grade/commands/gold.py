"""``python -m grade gold``."""

from __future__ import annotations

import argparse
from pathlib import Path

from grade.gold import GoldJudge
from grade.results import write_metrics
from grade.reviews import load_reviews

WORDS = (36, 128, None)
"""Lengths at which the judge is measured: about a prompt and a completion, a paragraph, the whole review."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--reviews", required=True, metavar="DIR", help="review splits")
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="judge.npz is written here")
    parser.add_argument("--metrics", required=True, metavar="FILE", help="accuracy on the test split")


def run(args: argparse.Namespace) -> None:
    """Fit on the gold split, measure on the test split."""
    gold, test = load_reviews(args.reviews, "gold"), load_reviews(args.reviews, "test")
    judge = GoldJudge.fit([r.text for r in gold], [r.label for r in gold])
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    judge.save(Path(args.output_dir) / "judge.npz")
    metrics = {"fit/n": len(gold)}
    for words in WORDS:
        texts = [" ".join(r.text.split()[:words]) for r in test]
        accuracy = judge.accuracy(texts, [r.label for r in test])
        name = f"accuracy/{words or 'all'}_words"
        metrics |= {name: accuracy.mean, f"{name}_stderr": accuracy.stderr, f"{name}_n": accuracy.n}
        print(f"gold judge, {words or 'all'} words: accuracy {accuracy}")
    write_metrics(args.metrics, metrics)
