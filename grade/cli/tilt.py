"""The command that finds a token bias."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from grade.cli.options import command, option
from grade.cli.runs import TILT_FILE
from grade.config_files import load_config
from grade.errors import InputError
from grade.files import atomic, write_json
from grade.training.config import TrainConfig
from grade.training.fit_bias import fit_bias
from grade.training.load import load_task


@command(
    "tilt",
    option("--reward", action="append", metavar="REWARD",
           help="overrides the config; several are added up: file.py:function, hf:<id>, ..."),
    option("--prompts", metavar="FILE", help="training prompts, in place of train_dataset"),
    option("--texts", metavar="SOURCE",
           help="what values of tokens come from: a file or hub id with prompt and completion, or text; reference:N, "
           "completions of the base; gradient or gradient:N (default: gradient if the reward has one, else "
           "reference:512)"),
    option("--overwrite", action="store_true", help="replace the adapter that is there"),
    output_dir="adapter/ with the token bias, tilt.json",
    config=TrainConfig,
)  # fmt: skip
def _tilt(args: argparse.Namespace) -> None:
    """Find a token bias, and say what it is worth."""
    given = {"output_dir": args.output_dir, "eval_dataset": ""}
    given |= {name: value for name, value in (("reward", args.reward), ("train_dataset", args.prompts)) if value}
    overrides = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in given.items())
    config = load_config(TrainConfig, args.config, [*args.set, *overrides])
    output = Path(config.output_dir)
    if (output / "adapter").exists() and not args.overwrite:
        raise InputError("output_dir", str(output), "a folder without an adapter, or --overwrite")
    task = load_task(config, config.device, new_adapter=False)
    found = fit_bias(task.backbone, task.reward_model, task.train_prompts, texts=args.texts, args=config)
    with atomic(output / "adapter") as folder:
        task.backbone.save_adapter(folder)
    write_json(output / TILT_FILE, found.numbers())
    print(f"{found.summary()}\nwrote {output}")
