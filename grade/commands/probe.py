"""``python -m grade probe``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from grade.adapter import LoraSettings
from grade.arithmetic import Problems
from grade.backbone import Backbone
from grade.checkpoint import OPTIMIZER_FILE, load_optimizer
from grade.commands.options import add_config_options
from grade.engines.base import RewardScope
from grade.entropy.probe import EntropyProbe
from grade.entropy.relaxed import reward_gradient
from grade.entropy.settings import ProbeConfig
from grade.evaluate import score
from grade.prompts import PromptBatch, encode_prompts, prompt_text
from grade.results import environment, replacing
from grade.reviews import load_reviews
from grade.reward import load_reward
from grade.train_config import TrainConfig


class ProbeRunConfig(ProbeConfig):
    """A probe, and the policy, task and optimizer that it is run on."""

    backbone: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter, if none is given")
    task: Literal["reviews", "arithmetic"] = Field(
        "reviews", description="reviews and a reward model, or sums and a verifier (extra: arithmetic)"
    )
    reward: str = Field("models/reward/bag", description="folder of a trained reward model (task reviews)")
    reward_scope: RewardScope = Field("prompt_and_completion", description="what the reward scores")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    max_prompt_tokens: int = Field(12, ge=1, description="prompts are cut to this many tokens, P")
    learning_rate: float = Field(2e-3, gt=0, description="AdamW learning rate, over a saved state's own")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    follow: list[str] = Field(
        [], description="YAML files of a training run: the update follows its relaxed loss, not a policy gradient"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--adapter", metavar="DIR", help="a trained adapter; default: a new one")
    parser.add_argument(
        "--optimizer-state", metavar="FILE",
        help="AdamW's state_dict; default: optimizer.pt beside the adapter, or none yet",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", default="report.json", help="the report (report.json)")
    add_config_options(parser, ProbeRunConfig)


def run(args: argparse.Namespace) -> None:
    """Predict and verify how the coming optimizer step moves the policy's entropy."""
    config = ProbeRunConfig.load(args.config, args.set)
    policy = Backbone.load(config.backbone, "float32", None if args.adapter else config.lora, args.adapter)
    prompts, update = _task(config, policy)
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), weight_decay=config.weight_decay)
    state = args.optimizer_state
    if not state and args.adapter and (Path(args.adapter) / OPTIMIZER_FILE).is_file():
        state = Path(args.adapter) / OPTIMIZER_FILE
    if state:
        load_optimizer(optimizer, state)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = config.learning_rate, config.weight_decay
    report = EntropyProbe(policy, optimizer, config, allow_fresh=not state).run(prompts, **update)
    with replacing(Path(args.output)) as file:
        content = {"environment": environment(), "config": config.model_dump(), **report.as_dict()}
        file.write(json.dumps(content, indent=1) + "\n")
    print(report.as_text())
    print(f"wrote {args.output}")


def _task(config: ProbeRunConfig, policy: Backbone) -> tuple[PromptBatch, dict[str, Any]]:
    """Prompts of both batches, and what the update follows."""
    number = config.batch_config.B * (1 if config.probe_config.one_batch else 2)
    if config.task == "arithmetic":
        problems = Problems.make(number, config.seed)
        prompts = problems.prompts(policy.tokenizer, config.max_prompt_tokens)
        return prompts, {"reward": lambda p, ids, mask: problems.reward(policy.tokenizer, p, ids, mask)}
    texts = [prompt_text(r.text) for r in load_reviews(config.reviews, "validation")][:number]
    prompts = encode_prompts(policy.tokenizer, texts, config.max_prompt_tokens)
    reward_model = load_reward(config.reward, policy)
    if config.follow:
        return prompts, {"gradient": reward_gradient(policy, reward_model, TrainConfig.load(config.follow))}
    return prompts, {
        "reward": lambda p, ids, mask: score(reward_model, policy, p, ids, mask, config.reward_scope)
    }  # fmt: skip
