"""Policies, and rewards of every kind on them: from one linear in embeddings to one that is no function of them.

| reward | |
|---|---|
| ``bag``, ``trunk`` | the trained reward models on the policy's embeddings: differentiable |
| ``trunk1``, ``trunk4`` | a head on the mean hidden state after so many layers, trained here: differentiable |
| ``smollm2_trunk`` | another base's trunk, which reads the text with its own tokenizer |
| ``gold`` | the gold judge on the text of prompt and completion |
| ``rule`` | `length_and_format` of the completion |
| ``sums`` | 1 where the completion is the sum that the prompt asks for |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from grade.data.reviews import load_reviews, prompt_text
from grade.errors import InputError
from grade.experiments.any_reward.measure.sums import ANSWER_TOKENS, load_sums
from grade.experiments.shallow import ShallowReward, layer_count
from grade.experiments.training_runs import judged_by
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_prompts, padded
from grade.models.sampling import generate
from grade.rewards.base import EmbeddingReward, Reward
from grade.rewards.fit import BagSettings, RewardConfig, train_reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardModel, load_reward
from grade.rewards.verifiers import exact_answer
from grade.training.toy import toy_reviews, toy_task

Policy = Literal["tiny", "smollm2", "sums"]
REWARDS: dict[str, tuple[str, ...]] = {
    "tiny": ("bag", "trunk1", "trunk", "smollm2_trunk", "gold", "rule"),
    "smollm2": ("bag", "trunk1", "trunk4", "trunk", "gold", "rule"),
    "sums": ("sums",),
}
"""Rewards of each policy."""
DIFFERENTIABLE = ("bag", "trunk1", "trunk4", "trunk")
GROUP = 4
"""Completions of a prompt."""
BATCH_ROWS = 64
"""Completions that are sampled, and texts that are read, at once."""
SHALLOW_REVIEWS = 600
"""Reviews that `trunk1` and `trunk4` are trained on, as in the study of estimators; a quarter as many stop it."""
_TOY_TOKENS = 12  # of a toy review that a toy's reward learns from
_SUM_TOKENS = 6  # of the longest prompt "a+b="


@dataclass(frozen=True)
class Folders:
    """Where a policy's base and reward models, reviews and the judge's file lie; empty: a toy's, made in memory.

    ``other`` is the base behind `smollm2_trunk`.
    """

    base: str = ""
    rewards: str = ""
    reviews: str = ""
    gold: str = ""
    other: str = ""
    other_rewards: str = ""


@dataclass(frozen=True)
class Subject:
    """A policy, ``untrained`` or ``trained``, with its rewards and all of its prompts, in the order of their split.

    A prompt has G = ``group`` completions of at most T = ``length`` tokens, and of at least ``min_length``.
    """

    policy: str
    stage: str
    backbone: Backbone
    rewards: Mapping[str, Reward]
    prompts: PromptBatch
    group: int
    length: int
    min_length: int

    def learner(self, **options: Any) -> DistilledGradient:
        """The method `distilled` with this policy's sizes."""
        config = MethodConfig(
            method="distilled", num_generations=self.group, max_completion_length=self.length,
            min_completion_length=self.min_length, **options,
        )  # fmt: skip
        return DistilledGradient(config, self.backbone)


def load_subject(
    policy: str, folders: Folders, rewards: Sequence[str], prompt_tokens: int = 12, length: int = 24,
    adapter: str = "", trained: Backbone | None = None,
) -> Subject:  # fmt: skip
    """Load a policy: the base with a new adapter, with the one in the folder ``adapter``, or ``trained`` itself."""
    minimum = length
    if policy == "sums":
        texts, length, minimum, prompt_tokens = load_sums(folders.base).train, ANSWER_TOKENS, 0, _SUM_TOKENS
    else:
        reviews = load_reviews(folders.reviews, "policy") if folders.reviews else toy_reviews(256, seed=1)
        texts = [prompt_text(review.text) for review in reviews]
    if trained is not None:
        backbone = trained
    elif folders.base:
        lora = None if adapter else LoraSettings()
        backbone = Backbone.load(Path(folders.base), lora=lora, adapter=adapter or None)
    else:
        backbone = toy_task().backbone
    made = {name: make_reward(name, backbone, folders) for name in rewards}
    prompts = encode_prompts(backbone.tokenizer, texts, prompt_tokens)
    stage = "trained" if adapter or trained is not None else "untrained"
    return Subject(policy, stage, backbone, made, prompts, GROUP, length, minimum)


def make_reward(name: str, backbone: Backbone, folders: Folders) -> Reward:
    """A reward of a policy by name. It reads the policy's base, never its adapter."""
    if name in ("bag", "trunk"):
        return EmbeddingReward(_trained(name, backbone, folders), name=name)
    if name in ("trunk1", "trunk4"):
        return EmbeddingReward(_shallow(int(name.removeprefix("trunk")), backbone, folders), name=name)
    functions: dict[str, Callable[[], Callable[..., list[float]]]] = {
        "smollm2_trunk": lambda: read_by(_other_trunk(backbone, folders)),
        "gold": lambda: judged_by(_judge(folders)),
        "rule": lambda: length_and_format,
        "sums": lambda: right_sum,
    }
    if name not in functions:
        raise InputError("reward", name, f"one of {', '.join((*DIFFERENTIABLE, *functions))}")
    return FunctionReward(functions[name](), name)


class BlackBox(Reward):
    """A reward of which only values are known; of the same name."""

    no_gradient = "a black box: only its values are known"

    def __init__(self, reward: Reward) -> None:
        self._reward, self.name, self.scope = reward, reward.name, reward.scope

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]."""
        return self._reward.score(policy, prompts, ids, mask)


def length_and_format(completions: Sequence[str], **_: Any) -> list[float]:
    """``(share of words of at most four letters + share of the text up to its last full stop) / 2``.

    A full stop is one of ``. ! ?``; the second share is of characters, without white space around the text. The first
    half adds up over words; the second depends on where in the text the last full stop is.

    >>> length_and_format(["It was fun. Great acting", "wonderful", "So it is!"])
    [0.529..., 0.0, 1.0]
    """
    rewards = []
    for text in map(str.strip, completions):
        words = re.findall(r"[^\W\d_]+", text)
        short = sum(len(word) <= 4 for word in words) / len(words) if words else 0.0
        stop = max(map(text.rfind, ".!?")) + 1
        rewards.append((short + (stop / len(text) if stop else 0.0)) / 2)
    return rewards


def right_sum(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
    """1 where a completion is the sum that its prompt "a+b=" asks for.

    >>> right_sum(["12+7=", "1+1="], ["19", "3"])
    [1.0, 0.0]
    """
    asked = [re.fullmatch(r"(\d+)\+(\d+)=", prompt) for prompt in prompts]
    if None in asked:
        raise InputError("prompt", prompts[asked.index(None)], "a sum, such as 12+7=")
    return exact_answer()(completions=completions, answer=[int(sum_[1]) + int(sum_[2]) for sum_ in asked])


def read_by(model: RewardModel) -> Callable[..., list[float]]:
    """A reward model as a function of text: it reads prompt and completion with its own base's tokenizer."""
    base = model.backbone

    def other_trunk(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        rows = base.tokenizer([p + c for p, c in zip(prompts, completions, strict=True)])["input_ids"]
        values: list[float] = []
        for start in range(0, len(rows), BATCH_ROWS):
            ids, mask = padded(rows[start : start + BATCH_ROWS], device=base.device)
            values += model.score_ids(ids, mask, BATCH_ROWS).tolist()
        return values

    return other_trunk


@torch.no_grad()
def sample_scored(
    subject: Subject, reward: str, n: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Completions of the first n / G prompts, `BATCH_ROWS` at a time: ids and mask [n, T], rewards [n] in float32."""
    group = subject.group
    if n < 1 or n % group or n > group * len(subject.prompts):
        allowed = f"a positive multiple of group = {group}, at most {group * len(subject.prompts)}"
        raise InputError("completions", n, f"{allowed} ({len(subject.prompts)} prompts)")
    repeated, objective = subject.prompts[slice(n // group)].repeat(group), Objective(subject.rewards[reward])
    parts = []
    for start in range(0, n, BATCH_ROWS):
        batch = repeated[slice(start, start + BATCH_ROWS)]
        ids, mask = generate(subject.backbone, batch, subject.length, generator, min_new_tokens=subject.min_length,
                             stop_early=False)  # fmt: skip
        parts.append((ids, mask, objective.score(subject.backbone, batch, ids, mask).float()))
    ids, mask, rewards = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids, mask, rewards


def _trained(kind: str, backbone: Backbone, folders: Folders) -> RewardModel | ShallowReward:
    """The trained reward model ``bag`` or ``trunk``; of a toy it is trained here."""
    if folders.rewards:
        return load_reward(Path(folders.rewards) / kind, backbone)
    train, held = toy_reviews(200, seed=2), toy_reviews(80, seed=3)
    if kind == "trunk":
        return ShallowReward(backbone, layer_count(backbone), train, held, _TOY_TOKENS)
    fit = BagSettings(epochs=5, lr=1e-2, batch_size=32, min_tokens=_TOY_TOKENS, max_tokens=2 * _TOY_TOKENS)
    return train_reward("bag", RewardConfig(bag=fit, eval_tokens=[_TOY_TOKENS]), backbone, train, held)[0]


def _shallow(depth: int, backbone: Backbone, folders: Folders) -> ShallowReward:
    layers = layer_count(backbone)
    if depth >= layers:
        raise InputError("reward", f"trunk{depth}", f"fewer layers than the base's {layers}: all of them are `trunk`")
    if not folders.reviews:
        return ShallowReward(backbone, depth, toy_reviews(80, seed=2), toy_reviews(20, seed=3), _TOY_TOKENS)
    data = load_reviews(folders.reviews, "reward")
    size = min(SHALLOW_REVIEWS, len(data) * 4 // 5)
    return ShallowReward(backbone, depth, data[:size], data[size : size + size // 4])


def _other_trunk(backbone: Backbone, folders: Folders) -> RewardModel:
    """A trunk reward on another base, which has another tokenizer."""
    if not folders.other:
        return toy_task(seed=1, kind="trunk").reward_model
    other = Backbone.load(folders.other, device=backbone.device)
    return load_reward(Path(folders.other_rewards) / "trunk", other).to(other.device)


def _judge(folders: Folders) -> GoldJudge:
    if folders.gold:
        return GoldJudge.load(folders.gold)
    reviews = toy_reviews(200, seed=4)
    return GoldJudge.fit([r.text for r in reviews], [r.label for r in reviews])
