"""Commands that train a policy and use it; help and an error about a setting need no torch."""

from __future__ import annotations

import argparse
import json

from grade.cli.options import command, option, print_metrics
from grade.config_files import load_config
from grade.errors import InputError
from grade.results import write_metrics
from grade.training.config import TrainConfig


@command(
    "train",
    option("--reward", action="append", metavar="REWARD",
           help="overrides the config; several are added up: file.py:function, hf:<id>, ..."),
    option("--resume", nargs="?", const="yes", default="no", choices=["no", "yes", "auto"],
           help="continue an interrupted run; auto: start over if a setting differs"),
    option("--overwrite", action="store_true", help="start over where there is a run"),
    output_dir="adapter, history.csv, metrics.json, ...",
    config=TrainConfig,
)  # fmt: skip
def _train(args: argparse.Namespace) -> None:
    """Train one policy."""
    given = {"output_dir": args.output_dir} | ({} if args.reward is None else {"reward": args.reward})
    overrides = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    config = load_config(TrainConfig, args.config, [*args.set, *overrides])
    from grade.training.run import train

    result = train(config, None, args.resume, args.overwrite)
    if config.process_index == 0:
        print(f"wrote {config.output_dir}" if result else f"{config.output_dir}: this run has finished")


@command(
    "evaluate",
    option("--prompts", type=int, metavar="N", help="held-out prompts; default: final_eval_prompts"),
    option("--output", metavar="FILE", help="also write the metrics here, as JSON"),
    adapter="a trained adapter, DIR/adapter of a run",
    config=TrainConfig,
)
def _evaluate(args: argparse.Namespace) -> None:
    """Evaluate an adapter with a training run's own settings; KL is to the bare base."""
    config = load_config(TrainConfig, args.config, args.set)
    if not config.eval_dataset:
        raise InputError("eval_dataset", config.eval_dataset, "held-out prompts to evaluate on")
    from grade.training.load import load_task
    from grade.training.run import evaluate_task

    task = load_task(config, config.device, adapter=args.adapter)
    n = args.prompts or config.final_eval_prompts or len(task.validation_prompts)
    metrics = evaluate_task(config, task, n).metrics()
    print_metrics(metrics)
    if args.output is not None:
        write_metrics(args.output, metrics)


@command(
    "generate",
    option("--prompt", required=True, action="append", help="text to complete; may be given several times"),
    option("--adapter", metavar="DIR", help="a trained adapter; without it, the base model"),
    option("--backbone", default="models/backbone", help="folder or hub id (default: models/backbone)"),
    option("--max-new-tokens", type=int, default=48, help="completion length in tokens (default: 48)"),
    option("--temperature", type=float, default=1.0, help="0 is greedy (default: 1.0)"),
    option("--samples", type=int, default=1, help="completions per prompt (default: 1)"),
    option("--seed", type=int, default=0, help="seed of the sampling noise (default: 0)"),
)
def _generate(args: argparse.Namespace) -> None:
    """Print completions."""
    import torch

    from grade.models.backbone import Backbone
    from grade.models.prompts import decode, encode_prompts
    from grade.models.sampling import generate

    backbone = Backbone.load(args.backbone, adapter=args.adapter)
    texts = [text for text in args.prompt for _ in range(args.samples)]
    prompts = encode_prompts(backbone.tokenizer, texts, 2**31)
    generator = torch.Generator().manual_seed(args.seed)
    ids, mask = generate(backbone, prompts, args.max_new_tokens, generator, args.temperature)
    for text, i, m in zip(texts, ids, mask, strict=True):
        print(f"{text}|{decode(backbone.tokenizer, i, m)}")
