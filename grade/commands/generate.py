"""``python -m grade generate``."""

from __future__ import annotations

import argparse

import torch

from grade.backbone import Backbone
from grade.errors import InputError
from grade.evaluate import decode
from grade.prompts import encode_prompts
from grade.rollout import generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--prompt", required=True, action="append", help="text to complete; may be given several times")
    parser.add_argument("--adapter", metavar="DIR", help="a trained adapter; without it, the base model")
    parser.add_argument("--backbone", default="models/backbone", help="folder or hub id (default: models/backbone)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="completion length in tokens (default: 48)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    parser.add_argument("--samples", type=int, default=1, help="completions a prompt (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Print completions."""
    if args.samples < 1:
        raise InputError("--samples", args.samples, "at least 1")
    backbone = Backbone.load(args.backbone, adapter=args.adapter)
    texts = [text for text in args.prompt for _ in range(args.samples)]
    limit = backbone.max_positions - max(args.max_new_tokens, 0)
    prompts = encode_prompts(backbone.tokenizer, texts, max(limit, 1))
    generator = torch.Generator().manual_seed(args.seed)
    ids, mask = generate(backbone, prompts, args.max_new_tokens, generator, args.temperature)
    for text, i, m in zip(texts, ids, mask, strict=True):
        print(f"{text}|{decode(backbone.tokenizer, i, m)}")
