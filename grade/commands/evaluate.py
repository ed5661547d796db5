"""``python -m grade evaluate``."""

from __future__ import annotations

import argparse

from grade.commands.options import add_config_options
from grade.errors import InputError
from grade.evaluate import evaluate
from grade.loop import load_task
from grade.results import write_metrics
from grade.train_config import TrainConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--adapter", required=True, metavar="DIR", help="a trained adapter, DIR/adapter of a run")
    parser.add_argument("--prompts", type=int, metavar="N", help="held-out prompts; default: final_eval_prompts")
    parser.add_argument("--output", metavar="FILE", help="also write the metrics here, as JSON")
    add_config_options(parser, TrainConfig)


def run(args: argparse.Namespace) -> None:
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
