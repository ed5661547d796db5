"""Commands that train a policy and use it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from grade.cli.options import add_config_options
from grade.config import read_values
from grade.errors import InputError
from grade.gradients.methods import METHODS
from grade.models.backbone import Backbone
from grade.models.prompts import decode, encode_prompts
from grade.models.sampling import generate
from grade.results import write_metrics
from grade.training.config import TrainConfig
from grade.training.evaluate import evaluate
from grade.training.load import load_task
from grade.training.loop import train


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--method", metavar="METHOD",
                        help=f"over the config's: {', '.join(METHODS)}; all: each, in its own folder")  # fmt: skip
    parser.add_argument("--output-dir", required=True, metavar="DIR", help="adapter, history.csv, metrics.json, ...")
    add_config_options(parser, TrainConfig)


def run_train(args: argparse.Namespace) -> None:
    """Train, one method or all of them."""
    # Every config is checked before the first run starts.
    if args.method == "all":
        values = read_values(args.config, args.set)
        configs = [TrainConfig.parse(TrainConfig.values_for(method, values)) for method in METHODS]
    else:
        configs = [TrainConfig.load(args.config, args.set, [f"method={args.method}"] if args.method else [])]
    for config in configs:
        output = Path(args.output_dir) / config.method if args.method == "all" else Path(args.output_dir)
        with _progress(config) as log:
            train(config, output, log)
        print(f"wrote {output}")


class _progress:
    """A bar on a terminal, plain lines elsewhere."""

    def __init__(self, config: TrainConfig) -> None:
        self.total, self.name = config.max_steps, config.method

    def __enter__(self) -> Callable[[str], None]:
        if not sys.stderr.isatty():
            return lambda line: print(line, flush=True)
        self.bar = tqdm(total=self.total, desc=self.name, unit="step", initial=-1)

        def log(line: str) -> None:
            self.bar.update(1)
            if "val/" in line:
                self.bar.write(line)

        return log

    def __exit__(self, *_) -> None:
        if sys.stderr.isatty():
            self.bar.close()


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--adapter", required=True, metavar="DIR", help="a trained adapter, DIR/adapter of a run")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out prompts; default: final_eval_prompts")
    parser.add_argument("--output", metavar="FILE", help="also write the metrics here, as JSON")
    add_config_options(parser, TrainConfig)


def run_evaluate(args: argparse.Namespace) -> None:
    """Evaluate an adapter with a training run's own settings."""
    config = TrainConfig.load(args.config, args.set)
    n = config.final_eval_prompts if args.prompts is None else args.prompts
    task = load_task(config, "cpu" if config.device == "auto" else config.device, adapter=args.adapter)
    if not 2 <= n <= len(task.validation_prompts):
        raise InputError("--prompts", n, f"2 to {len(task.validation_prompts)}, the size of the validation split")
    result = evaluate(
        task.backbone, task.validation_prompts[:n], task.reward_model, task.judge,
        max_new_tokens=config.max_new_tokens, max_prompt_tokens=config.max_prompt_tokens,
        min_new_tokens=config.min_new_tokens, scope=config.reward_scope, batch_size=config.eval_batch_size,
        kl_prompts=config.kl_eval_prompts,
    )  # fmt: skip
    metrics = result.metrics()
    for name, value in metrics.items():
        print(f"{name} {value:.4g}")
    if args.output:
        write_metrics(args.output, metrics)


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--prompt", required=True, action="append", help="text to complete; may be given several times")
    parser.add_argument("--adapter", metavar="DIR", help="a trained adapter; without it, the base model")
    parser.add_argument("--backbone", default="models/backbone", help="folder or hub id (default: models/backbone)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="completion length in tokens (default: 48)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)")
    parser.add_argument("--samples", type=int, default=1, help="completions a prompt (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)")


def run_generate(args: argparse.Namespace) -> None:
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
