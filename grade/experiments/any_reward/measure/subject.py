"""What is measured: a policy, untrained or trained, its rewards and its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grade.data.reviews import load_reviews, prompt_text
from grade.experiments.any_reward.measure.rewards import REWARDS, Folders, make_reward
from grade.experiments.any_reward.measure.sums import ANSWER_TOKENS, SumsConfig, build_sums, load_sums
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_prompts
from grade.rewards.base import Reward
from grade.training.toy import toy_reviews, toy_task

_SUM_TOKENS = 6
"""Tokens of the longest prompt "a+b="."""


@dataclass(frozen=True)
class Subject:
    """A policy with its rewards.

    Attributes:
        policy: ``tiny``, ``smollm2`` or ``sums``.
        stage: ``untrained`` or ``trained``.
        backbone: The policy.
        rewards: By name.
        prompts: All of its prompts, in the order of their split.
        group: G.
        length: T.
        min_length: End-of-sequence is not sampled before this many tokens.
    """

    policy: str
    stage: str
    backbone: Backbone
    rewards: Mapping[str, Reward]
    prompts: PromptBatch
    group: int
    length: int
    min_length: int


def load_subject(
    policy: str, base: str, folders: Folders, adapter: str = "", rewards: Sequence[str] = (), prompt_tokens: int = 12,
    length: int = 24, group: int = 4, device: str = "cpu", sums: SumsConfig | None = None,
    trained: Backbone | None = None,
) -> Subject:  # fmt: skip
    """Load a policy.

    Args:
        policy: ``tiny``, ``smollm2`` or ``sums``.
        base: Folder of its base; empty: the toy task's. That of ``sums`` is made where it is missing.
        folders: Reward models and reviews.
        adapter: Folder of a trained adapter; empty: a new one, whose policy is the base.
        rewards: Names; default: all of `REWARDS`.
        prompt_tokens: P, the most tokens of a prompt.
        length: T; all completions have T tokens, except those of ``sums``.
        group: G.
        device: Where to run.
        sums: How the policy of sums is made.
        trained: A trained policy, in place of the one that base and adapter give.

    Raises:
        InputError: If a file is missing, or a reward is unknown.
    """
    minimum = length
    if policy == "sums":
        build_sums(base, sums)
        texts, length, minimum, prompt_tokens = load_sums(base).train, ANSWER_TOKENS, 0, _SUM_TOKENS
    elif folders.reviews:
        texts = [prompt_text(review.text) for review in load_reviews(folders.reviews, "policy")]
    else:
        texts = [prompt_text(review.text) for review in toy_reviews(256, seed=1)]
    if trained is not None:
        backbone = trained
    elif base:
        lora = None if adapter else LoraSettings()
        backbone = Backbone.load(Path(base), lora=lora, adapter=adapter or None, device=device)
    else:
        backbone = toy_task().backbone
    made = {name: make_reward(name, backbone, folders) for name in rewards or REWARDS[policy]}
    prompts = encode_prompts(backbone.tokenizer, texts, prompt_tokens)
    prompts = PromptBatch(prompts.ids.to(torch.device(device)), prompts.mask.to(torch.device(device)))
    stage = "trained" if adapter or trained is not None else "untrained"
    return Subject(policy, stage, backbone, made, prompts, group, length, minimum)
