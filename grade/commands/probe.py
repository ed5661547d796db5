"""``python -m grade probe``."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path

import torch
from pydantic import Field

from grade.adapter import LoraSettings
from grade.backbone import Backbone
from grade.commands.options import add_config_options
from grade.engines.base import RewardScope
from grade.entropy.probe import EntropyProbe, ProbeConfig
from grade.errors import InputError
from grade.evaluate import score
from grade.prompts import encode_prompts, prompt_text
from grade.results import environment, replacing
from grade.reviews import load_reviews
from grade.reward import load_reward


class ProbeRunConfig(ProbeConfig):
    """A probe, and the policy, reward, text and optimizer that it is run on."""

    backbone: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter, if none is given")
    reward: str = Field("models/reward/bag", description="folder of a trained reward model")
    reward_scope: RewardScope = Field("prompt_and_completion", description="what the reward scores")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    max_prompt_tokens: int = Field(12, ge=1, description="prompts are cut to this many tokens, P")
    learning_rate: float = Field(2e-3, gt=0, description="AdamW learning rate")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--adapter", metavar="DIR", help="a trained adapter; default: a new one")
    parser.add_argument(
        "--optimizer-state", metavar="FILE", help="state_dict of AdamW, by torch.save; default: none yet"
    )
    parser.add_argument("--output", metavar="FILE", default="report.json", help="the report (report.json)")
    add_config_options(parser, ProbeRunConfig)


def run(args: argparse.Namespace) -> None:
    """Predict and verify how the coming optimizer step moves the policy's entropy."""
    config = ProbeRunConfig.load(args.config, args.set)
    policy = Backbone.load(config.backbone, "float32", None if args.adapter else config.lora, args.adapter)
    reward_model = load_reward(config.reward, policy)
    texts = [prompt_text(r.text) for r in load_reviews(config.reviews, "validation")][: 2 * config.batch_config.B]
    prompts = encode_prompts(policy.tokenizer, texts, config.max_prompt_tokens)
    optimizer = torch.optim.AdamW(
        policy.trainable_parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    if args.optimizer_state:
        _load_state(optimizer, args.optimizer_state)
    probe = EntropyProbe(policy, optimizer, config, allow_fresh=not args.optimizer_state)
    report = probe.run(prompts, lambda p, ids, mask: score(reward_model, policy, p, ids, mask, config.reward_scope))
    with replacing(Path(args.output)) as file:
        content = {"environment": environment(), "config": config.model_dump(), **report.as_dict()}
        file.write(json.dumps(content, indent=1) + "\n")
    print(report.as_text())
    print(f"wrote {args.output}")


def _load_state(optimizer: torch.optim.AdamW, path: str) -> None:
    try:
        optimizer.load_state_dict(torch.load(path, weights_only=True))
    except (OSError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else error.__class__.__name__
        raise InputError("--optimizer-state", path, f"AdamW's state_dict for this adapter ({reason})") from None
