"""Policies, and rewards of every kind on them: from one linear in embeddings to one that is no function of them.

| reward | |
|---|---|
| ``bag``, ``trunk`` | the trained reward models on the policy's embeddings: differentiable |
| ``smollm2_trunk`` | SmolLM2's trunk, which reads the text with its own tokenizer |
| ``gold`` | the gold judge on the text of prompt and completion |
| ``rule`` | `length_and_format` of the completion |
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.errors import InputError
from grade.experiments.training_runs import judged_by
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, padded
from grade.rewards.base import EmbeddingReward, Reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardModel, load_reward
from grade.training.toy import toy_task

Policy = Literal["tiny", "smollm2"]
RewardName = Literal["bag", "trunk", "smollm2_trunk", "gold", "rule"]
DIFFERENTIABLE = ("bag", "trunk")
OWN = "own"
"""The source of texts of methods that read none: completions of the policy."""
BATCH_ROWS = 64
"""Texts that a reward model reads at once."""


class Models(Config):
    """Where models and data lie, and lengths; what has no folder is a toy's, made in memory."""

    tiny_dir: str = Field("", description="folder of the tiny language model; empty: the toy task's")
    tiny_rewards_dir: str = Field("", description="folder of its reward models")
    smollm2_dir: str = Field("", description="folder of SmolLM2, policy and other base of smollm2_trunk; empty: a toy")
    smollm2_rewards_dir: str = Field("", description="folder of its reward models")
    gold_file: str = Field("", description="the gold judge")
    reviews_dir: str = Field("", description="folder of the review splits")
    prompt_tokens: int = Field(4, ge=1, description="P")
    new_tokens: int = Field(12, ge=1, description="T, the length of every completion")


def source_values(models: Models, source: str) -> dict[str, Any]:
    """The settings of training that name a source of texts."""
    if source == OWN:
        return {}
    if not source.isdecimal():
        return {"texts": source}
    if not models.reviews_dir:
        raise InputError("sources", source, "reference:N, where no reviews_dir has text to cut into windows")
    return {"texts": str(Path(models.reviews_dir, "policy.jsonl")), "most_texts": int(source)}


def number_of_texts(source: str) -> int:
    """How many texts a source has.

    >>> number_of_texts("4096"), number_of_texts("reference:64"), number_of_texts("own")
    (4096, 64, 0)
    """
    return int(source.rpartition(":")[2]) if source != OWN else 0


def make_reward(models: Models, policy: str, name: str, backbone: Backbone) -> Reward:
    """A reward of a policy by name. It reads the policy's base, never its adapter."""
    if name == "rule":
        return FunctionReward(length_and_format, name)
    if name == "gold":
        judge = GoldJudge.load(models.gold_file) if models.gold_file else toy_task().judge
        return FunctionReward(judged_by(judge), name)
    if name == "smollm2_trunk":
        if not models.smollm2_dir:
            return FunctionReward(_read_by(toy_task(seed=1, kind="trunk").reward_model), name)
        other = Backbone.load(models.smollm2_dir, device=backbone.device)
        model = load_reward(Path(models.smollm2_rewards_dir, "trunk"), other).to(other.device)
        return FunctionReward(_read_by(model), name)
    folder = getattr(models, f"{policy}_rewards_dir")
    model = load_reward(Path(folder, name), backbone) if folder else toy_task(kind=name).reward_model
    return EmbeddingReward(model, name=name)


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


def _read_by(model: RewardModel) -> Callable[..., list[float]]:
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
