"""Commands that train a policy and use it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from grade.cli.options import command, option, print_metrics
from grade.config import SEEDS, check_bytes, origin, read_values
from grade.errors import InputError
from grade.files import check_file, writing
from grade.gradients.methods import BYTES_PER_TOKEN, METHODS
from grade.models.backbone import Backbone
from grade.models.prompts import decode, encode_prompts
from grade.models.room import check_room
from grade.models.sampling import generate
from grade.results import write_metrics
from grade.training.config import TrainConfig
from grade.training.load import load_task
from grade.training.run import evaluate_task, train


@command(
    "train",
    option("--reward", action="append", metavar="REWARD",
           help="overrides the config; several are added up: file.py:function, hf:<id>, ..."),
    option("--resume", nargs="?", const="yes", default="no", choices=["no", "yes", "auto"],
           help="continue an interrupted run; auto: start over if something changed"),
    option("--overwrite", action="store_true", help="start over where there is an interrupted run"),
    output_dir="adapter, history.csv, metrics.json, ...",
    config=TrainConfig,
    others="and every argument of transformers.TrainingArguments; method: all trains each method that samples",
)  # fmt: skip
def _train(args: argparse.Namespace) -> None:
    """Train, one method or all of them."""
    # Every config is checked before the first run starts.
    given = {"output_dir": args.output_dir} | ({} if args.reward is None else {"reward": args.reward})
    overrides = [*args.set, *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())]
    values = read_values(args.config, overrides)  # once: a file may be a pipe
    if values.get("method") == "all":
        configs = []
        for method in METHODS:
            own = {"method": method, "output_dir": str(Path(args.output_dir) / method)}
            configs.append(TrainConfig.parse(TrainConfig.values_for(method, values) | own))
    else:
        configs = [TrainConfig.parse(values, *origin(args.config, overrides))]
    for config in configs:
        show = config.process_index == 0
        result = train(config, None, args.resume, args.overwrite)
        if result and result.received is not None and (result.interrupted or config is not configs[-1]):
            if show:
                print(f"interrupted after step {result.step}: continue with --resume", file=sys.stderr)
            raise SystemExit(128 + result.received)
        if show:
            print(f"wrote {config.output_dir}" if result else f"{config.output_dir}: this run has finished")


@command(
    "evaluate",
    option("--prompts", type=int, metavar="N", help="held-out prompts; default: final_eval_prompts"),
    option("--output", metavar="FILE", help="also write the metrics here, as JSON"),
    adapter="a trained adapter, DIR/adapter of a run",
    config=TrainConfig,
    others="and every argument of transformers.TrainingArguments",
)
def _evaluate(args: argparse.Namespace) -> None:
    """Evaluate an adapter with a training run's own settings."""
    config = TrainConfig.load(args.config, args.set)
    if not config.eval_dataset:
        raise InputError("eval_dataset", config.eval_dataset, "held-out prompts to evaluate on")
    if args.output is not None:
        check_file(args.output, "--output")
    task = load_task(config, config.device, adapter=args.adapter)
    given = args.prompts if args.prompts is not None else config.final_eval_prompts
    n = len(task.validation_prompts) if given is None else given
    if not 2 <= n <= len(task.validation_prompts):
        raise InputError("--prompts", n, f"2 to {len(task.validation_prompts)}, the rows of {config.eval_dataset}")
    metrics = evaluate_task(config, task, n).metrics()
    print_metrics(metrics)
    if args.output is not None:
        with writing(args.output, "--output", "file"):
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
    sizes = {"--samples": args.samples, "--max-new-tokens": args.max_new_tokens}
    for name, size in sizes.items():
        if size < 1:
            raise InputError(name, size, "at least 1")
    if not 0 <= args.seed < SEEDS:
        raise InputError("--seed", args.seed, f"0 to {SEEDS - 1}")
    check_bytes(sizes, BYTES_PER_TOKEN)
    backbone = Backbone.load(args.backbone, adapter=args.adapter)
    check_room(backbone, sizes)
    texts = [text for text in args.prompt for _ in range(args.samples)]
    prompts = encode_prompts(backbone.tokenizer, texts, 2**31)
    generator = torch.Generator().manual_seed(args.seed)
    ids, mask = generate(backbone, prompts, args.max_new_tokens, generator, args.temperature)
    for text, i, m in zip(texts, ids, mask, strict=True):
        print(f"{text}|{decode(backbone.tokenizer, i, m)}")
