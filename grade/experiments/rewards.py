"""Policies, and rewards of every kind on them: from one linear in embeddings to one that is no function of them.

| reward | |
|---|---|
| ``bag``, ``trunk`` | the trained reward models on the policy's embeddings: differentiable |
| ``trunk1``, ``trunk4`` | a head on the mean hidden state after so many layers, trained here: differentiable |
| ``smollm2_trunk`` | SmolLM2's trunk, which reads the text with its own tokenizer |
| ``gold`` | the gold judge on the text of prompt and completion |
| ``rule`` | `length_and_format` of the completion |
| ``sums`` | 1 where the completion is the sum that the prompt asks for; of the policy of sums alone |
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.data.reviews import load_reviews, prompt_text
from grade.errors import InputError
from grade.experiments.shallow import ShallowReward
from grade.experiments.sums import ANSWER_TOKENS, sum_prompts, sums_folder
from grade.experiments.training_runs import BATCH_ROWS, judged_by
from grade.gradients.distilled.families import layers_of
from grade.gradients.distilled.learner import DistilledGradient
from grade.gradients.methods import MethodConfig
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_examples, encode_prompts, padded
from grade.rewards.base import EmbeddingReward, Reward
from grade.rewards.fit import BagSettings, RewardConfig, train_reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardModel, load_reward
from grade.training.toy import toy_reviews, toy_task

Policy = Literal["tiny", "smollm2", "sums"]
RewardName = Literal["bag", "trunk1", "trunk4", "trunk", "smollm2_trunk", "gold", "rule", "sums"]
FamilyName = Annotated[str, Field(pattern=r"^(counts|bag|ngrams|values|trunk\d*)$")]
"""Name of a family; see `grade.gradients.distilled.families.make_family`."""
DIFFERENTIABLE = ("bag", "trunk1", "trunk4", "trunk")
GROUP = 4
"""Completions of a prompt."""
OWN = "own"
"""The source of texts of methods that read none: completions of the policy."""
SHALLOW_REVIEWS = 600
"""Reviews that `trunk1` and `trunk4` are trained on, as in the study of estimators; a quarter as many stop it."""
_TOY_TOKENS = 12  # of a toy review that a toy's reward learns from
_SUM_TOKENS = 6  # of the longest prompt "a+b="


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

    def base(self, policy: str) -> str:
        """Folder of a policy; that of sums is trained when it is first asked for."""
        return sums_folder().name if policy == "sums" else getattr(self, f"{policy}_dir")

    def encode(self, backbone: Backbone, rows: Sequence[Mapping[str, Any]]) -> PromptBatch:
        """Prompts of rows, cut to P tokens."""
        return encode_examples(backbone.tokenizer, rows, self.prompt_tokens, "right", warn_raw=False)


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


@dataclass(frozen=True)
class Subject:
    """A policy, ``untrained`` or ``trained``, with its rewards and all of its prompts, in the order of their split.

    A prompt has `GROUP` completions of at most T = ``length`` tokens, and of at least ``min_length``.
    """

    policy: str
    stage: str
    backbone: Backbone
    rewards: Mapping[str, Reward]
    prompts: PromptBatch
    length: int
    min_length: int

    def learner(self, **options: Any) -> DistilledGradient:
        """The method `distilled` with this policy's sizes."""
        config = MethodConfig(
            method="distilled", num_generations=GROUP, max_completion_length=self.length,
            min_completion_length=self.min_length, **options,
        )  # fmt: skip
        return DistilledGradient(config, self.backbone)


def load_subject(
    models: Models, policy: str, rewards: Sequence[str], adapter: str = "", trained: Backbone | None = None
) -> Subject:
    """Load a policy: the base with a new adapter, with the one in the folder ``adapter``, or ``trained`` itself."""
    length = minimum = models.new_tokens
    prompt_tokens, folder = models.prompt_tokens, models.base(policy)
    if policy == "sums":
        texts, length, minimum, prompt_tokens = sum_prompts()[0], ANSWER_TOKENS, 0, _SUM_TOKENS
    else:
        reviews = load_reviews(models.reviews_dir, "policy") if models.reviews_dir else toy_reviews(256, seed=1)
        texts = [prompt_text(review.text) for review in reviews]
    if trained is not None:
        backbone = trained
    elif folder:
        backbone = Backbone.load(folder, lora=None if adapter else LoraSettings(), adapter=adapter or None)
    else:
        backbone = toy_task().backbone
    made = {name: make_reward(models, policy, name, backbone) for name in rewards}
    prompts = encode_prompts(backbone.tokenizer, texts, prompt_tokens)
    stage = "trained" if adapter or trained is not None else "untrained"
    return Subject(policy, stage, backbone, made, prompts, length, minimum)


def make_reward(models: Models, policy: str, name: str, backbone: Backbone) -> Reward:
    """A reward of a policy by name. It reads the policy's base, never its adapter."""
    if name == "sums":
        return FunctionReward(right_sum, name)
    if name == "rule":
        return FunctionReward(length_and_format, name)
    if name == "gold":
        if models.gold_file:
            return FunctionReward(judged_by(GoldJudge.load(models.gold_file)), name)
        reviews = toy_reviews(200, seed=4)
        return FunctionReward(judged_by(GoldJudge.fit([r.text for r in reviews], [r.label for r in reviews])), name)
    if name == "smollm2_trunk":
        if not models.smollm2_dir:
            return FunctionReward(_read_by(toy_task(seed=1, kind="trunk").reward_model), name)
        other = Backbone.load(models.smollm2_dir, device=backbone.device)
        folder = Path(models.smollm2_rewards_dir) / "trunk"
        return FunctionReward(_read_by(load_reward(folder, other).to(other.device)), name)
    if name in ("trunk1", "trunk4"):
        return EmbeddingReward(_shallow(models, int(name.removeprefix("trunk")), backbone), name=name)
    folder = getattr(models, f"{policy}_rewards_dir")
    model = load_reward(Path(folder) / name, backbone) if folder else _toy_model(name, backbone)
    return EmbeddingReward(model, name=name)


def _shallow(models: Models, depth: int, backbone: Backbone) -> ShallowReward:
    if not models.reviews_dir:
        return ShallowReward(backbone, depth, toy_reviews(80, seed=2), toy_reviews(20, seed=3), _TOY_TOKENS)
    data = load_reviews(models.reviews_dir, "reward")
    size = min(SHALLOW_REVIEWS, len(data) * 4 // 5)
    return ShallowReward(backbone, depth, data[:size], data[size : size + size // 4])


def _toy_model(kind: str, backbone: Backbone) -> RewardModel | ShallowReward:
    train, held = toy_reviews(200, seed=2), toy_reviews(80, seed=3)
    if kind == "trunk":
        return ShallowReward(backbone, layers_of(backbone), train, held, _TOY_TOKENS)
    fit = BagSettings(epochs=5, lr=1e-2, batch_size=32, min_tokens=_TOY_TOKENS, max_tokens=2 * _TOY_TOKENS)
    return train_reward("bag", RewardConfig(bag=fit, eval_tokens=[_TOY_TOKENS]), backbone, train, held)[0]


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


def right_sum(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
    """1 where a completion is the sum that its prompt "a+b=" asks for.

    >>> right_sum(["12+7=", "1+1="], ["19", "3"])
    [1.0, 0.0]
    """
    asked = [re.fullmatch(r"(\d+)\+(\d+)=", prompt) for prompt in prompts]
    if None in asked:
        raise InputError("prompt", prompts[asked.index(None)], "a sum, such as 12+7=")
    answers = [str(int(sum_[1]) + int(sum_[2])) for sum_ in asked]
    return [float(text.strip() == answer) for text, answer in zip(completions, answers, strict=True)]


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
