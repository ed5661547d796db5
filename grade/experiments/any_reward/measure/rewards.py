"""Rewards of every kind on one policy, by name: from one linear in embeddings to one that is no function of them.

Each gives rewards [B] by `Reward.score`. Those on the policy's own embeddings (`bag`, `trunk` and what
lies between) are differentiable too; `BlackBox` hides that. The others are functions of text with TRL's signature,
so a peer's trainer takes the same function (`FunctionReward.function`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grade.data.reviews import load_reviews
from grade.errors import InputError
from grade.experiments.shallow import ShallowReward, layer_count
from grade.experiments.training_runs import judged_by
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.rewards.base import EmbeddingReward, Reward
from grade.rewards.fit import BagSettings, LabelledText, RewardConfig, right_pad, train_reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import RewardModel, load_reward
from grade.rewards.verifiers import exact_answer
from grade.training.toy import toy_reviews, toy_task

REWARDS: dict[str, tuple[str, ...]] = {
    "tiny": ("bag", "trunk1", "trunk", "smollm2_trunk", "gold", "rule"),
    "smollm2": ("bag", "trunk1", "trunk4", "trunk", "gold", "rule"),
    "sums": ("sums",),
}
"""Rewards of each policy, from the smoothest to those that are no function of embeddings."""
NAMES = tuple(dict.fromkeys(name for names in REWARDS.values() for name in names))
BATCH_ROWS = 64
"""Completions that are sampled, and texts that are read, at once."""
SHALLOW_REVIEWS = 600
"""Reviews that `trunk1` and `trunk4` are trained on, as in the study of estimators; a quarter as many stop it."""
_TOY_TOKENS = 12  # of a toy review that a toy's reward learns from
_WORD = re.compile(r"[^\W\d_]+")
_SENTENCE_END = re.compile(r"[.!?]")
_SHORT = 4  # letters; about two words of three of either policy are as short

TextFunction = Callable[..., list[float]]


@dataclass(frozen=True)
class Folders:
    """Where reward models and reviews lie. Empty: what a toy needs is made in memory.

    Attributes:
        rewards: Folder of the policy's trained reward models, with ``bag`` and ``trunk``.
        reviews: Folder of the review splits; `trunk1` and `trunk4` are trained on ``reward``.
        gold: File of the gold judge.
        other: Folder of the base behind `smollm2_trunk`.
        other_rewards: Folder of that base's reward models.
    """

    rewards: str = ""
    reviews: str = ""
    gold: str = ""
    other: str = ""
    other_rewards: str = ""


def make_reward(name: str, backbone: Backbone, folders: Folders) -> Reward:
    """A reward of a policy.

    - ``bag``, ``trunk``: the trained reward models on the policy's embeddings.
    - ``trunk1``, ``trunk4``: a head on the mean hidden state after so many layers, trained here, always the same.
    - ``smollm2_trunk``: another base's trunk, which reads the text of prompt and completion with its own tokenizer.
    - ``gold``: the gold judge on that text.
    - ``rule``: see `length_and_format`, on the completion.
    - ``sums``: 1 where the completion is the sum that the prompt asks for.

    Args:
        name: One of `NAMES`.
        backbone: The policy; the reward reads its base, never its adapter.
        folders: Where models lie.

    Returns:
        The reward, with ``name`` and ``score``; the first four can be called with embeddings too.

    Raises:
        InputError: For an unknown name, a depth that the base does not have or that is its whole trunk, or a missing
            file.
    """
    if name not in NAMES:
        raise InputError("reward", name, f"one of {', '.join(NAMES)}")
    if name in ("bag", "trunk", "trunk1", "trunk4"):
        model = _shallow(name, backbone, folders) if name[-1].isdigit() else _trained(name, backbone, folders)
        return EmbeddingReward(model, name=name)
    functions: dict[str, Callable[[], TextFunction]] = {
        "smollm2_trunk": lambda: read_by(_other_trunk(backbone, folders)),
        "gold": lambda: judged_by(_judge(folders)),
        "rule": lambda: length_and_format,
        "sums": lambda: right_sum,
    }
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
    """A rule of length and format: short words, finished sentences.

    ``R = (share of words of at most four letters + share of the text up to its last full stop) / 2``, where a full
    stop is one of ``. ! ?`` and shares are of words and of characters (without white space around the text). Its first
    half adds up over words; its second depends on where in the text the last full stop is.

    Args:
        completions: Texts.

    Returns:
        Rewards in [0, 1]; 0 for a text without words and full stops.

    >>> length_and_format(["It was fun. Great acting", "wonderful", "So it is!"])
    [0.529..., 0.0, 1.0]
    """
    return [(_short_words(text) + _finished(text)) / 2 for text in completions]


def right_sum(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float | None]:
    """1 where a completion is the sum that its prompt asks for.

    Args:
        prompts: Texts "a+b=".
        completions: Texts.

    Returns:
        0 or 1 for each.

    Raises:
        InputError: For a prompt that asks for no sum.

    >>> right_sum(["12+7=", "1+1="], ["19", "3"])
    [1.0, 0.0]
    """
    return exact_answer()(completions=completions, answer=[_answer(prompt) for prompt in prompts])


def read_by(model: RewardModel) -> TextFunction:
    """A reward model as a function of text: it reads prompt and completion with its own base's tokenizer.

    Args:
        model: The reward model on its base.

    Returns:
        The function; `BATCH_ROWS` texts pass the base at once, without gradient.
    """
    base = model.backbone

    def other_trunk(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        rows = base.tokenizer(texts)["input_ids"]
        values: list[float] = []
        for start in range(0, len(rows), BATCH_ROWS):
            ids, mask = right_pad(rows[start : start + BATCH_ROWS], base.device)
            values += model.score_ids(ids, mask, BATCH_ROWS).tolist()
        return values

    return other_trunk


@torch.no_grad()
def sample_scored(
    backbone: Backbone, reward: Reward, prompts: PromptBatch, group: int, length: int, n: int,
    generator: torch.Generator, min_length: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Completions of the policy with their rewards, `BATCH_ROWS` at a time.

    Args:
        backbone: The policy.
        reward: The reward.
        prompts: Prompts; the first n / G are used.
        group: G, completions of a prompt; they follow one another.
        length: T, the most tokens of a completion.
        n: Completions in all.
        generator: Source of the noise, on the backbone's device.
        min_length: End-of-sequence is not sampled before this many tokens; T: all completions have T tokens.

    Returns:
        Ids [n, T] and mask [n, T], and rewards [n] in float32.

    Raises:
        InputError: If n is not a positive multiple of G, or there are too few prompts.
    """
    if group < 1 or n < 1 or n % group or n > group * len(prompts):
        allowed = f"a positive multiple of group = {group}, at most {group * len(prompts)} ({len(prompts)} prompts)"
        raise InputError("n", n, allowed)
    repeated, objective = prompts[slice(n // group)].repeat(group), Objective(reward)
    parts = []
    for start in range(0, n, BATCH_ROWS):
        batch = repeated[slice(start, start + BATCH_ROWS)]
        ids, mask = generate(backbone, batch, length, generator, min_new_tokens=min_length, stop_early=False)
        parts.append((ids, mask, objective.score(backbone, batch, ids, mask).float()))
    ids, mask, rewards = (torch.cat(part) for part in zip(*parts, strict=True))
    return ids, mask, rewards


def _short_words(text: str) -> float:
    words = _WORD.findall(text)
    return sum(len(word) <= _SHORT for word in words) / len(words) if words else 0.0


def _finished(text: str) -> float:
    text = text.strip()
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return ends[-1] / len(text) if ends else 0.0


def _answer(prompt: str) -> int:
    asked = re.fullmatch(r"(\d+)\+(\d+)=", prompt)
    if asked is None:
        raise InputError("prompt", prompt, "a sum, such as 12+7=")
    return int(asked[1]) + int(asked[2])


def _trained(kind: str, backbone: Backbone, folders: Folders) -> RewardModel | ShallowReward:
    """The trained reward model ``bag`` or ``trunk``; of a toy it is trained here."""
    if folders.rewards:
        return load_reward(Path(folders.rewards) / kind, backbone)
    train, held = toy_reviews(200, seed=2), toy_reviews(80, seed=3)
    if kind == "trunk":
        return ShallowReward(backbone, layer_count(backbone), train, held, _TOY_TOKENS)
    fit = BagSettings(epochs=5, lr=1e-2, batch_size=32, min_tokens=_TOY_TOKENS, max_tokens=2 * _TOY_TOKENS)
    return train_reward("bag", RewardConfig(bag=fit, eval_tokens=[_TOY_TOKENS]), backbone, train, held)[0]


def _shallow(name: str, backbone: Backbone, folders: Folders) -> ShallowReward:
    depth, layers = int(name.removeprefix("trunk")), layer_count(backbone)
    if depth >= layers:
        raise InputError("reward", name, f"fewer layers than the base's {layers}: all of them are `trunk`")
    if not folders.reviews:
        return ShallowReward(backbone, depth, toy_reviews(80, seed=2), toy_reviews(20, seed=3), _TOY_TOKENS)
    data: list[LabelledText] = load_reviews(folders.reviews, "reward")
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
