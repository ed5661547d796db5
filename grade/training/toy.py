"""A complete task in memory, made in seconds: invented reviews, a tiny random model, reward and judge.

The notebooks' default parameters, the README's example and the tests use it, so they need no download. Its text is
made from templates and its model is untrained: it exercises the code and says nothing about the method. With
``pretrain_steps`` the model first learns to write such text, so that a person can read what training changes.
"""

from __future__ import annotations

import numpy as np

from grade.data.reviews import Review, prompt_text
from grade.data.tiny_lm import PretrainConfig, fit, new_model, text_windows, tiny_model, train_tokenizer
from grade.models.adapter import LoraSettings
from grade.models.backbone import DTYPES, Backbone
from grade.rewards.fit import BagSettings, RewardConfig, TrunkSettings, train_reward
from grade.rewards.gold import GoldJudge
from grade.training.load import Task

_OPENINGS = ("The film", "This movie", "Last night's show", "The second half", "Her new drama", "That old western")
_GOOD = ("wonderful", "moving", "clever", "charming", "a delight", "beautifully acted", "great fun")
_BAD = ("dull", "clumsy", "a mess", "painfully slow", "badly acted", "a waste of time", "forgettable")
_LINKS = ("and", "because the story is", "while the music was", "since every scene felt")


def toy_reviews(n: int, seed: int = 0) -> list[Review]:
    """Reviews made from templates, half of them positive (label 1).

    >>> toy_reviews(1)[0].label in (0, 1)
    True
    """
    rng = np.random.default_rng(seed)
    reviews = []
    for i in range(n):
        words = _GOOD if i % 2 else _BAD
        parts = [f"{rng.choice(_OPENINGS)} was {rng.choice(words)} {rng.choice(_LINKS)} {rng.choice(words)}."
                 for _ in range(3)]  # fmt: skip
        reviews.append(Review(" ".join(parts), i % 2))
    return reviews


def toy_task(
    seed: int = 0, kind: str = "bag", dtype: str = "float32", lora: LoraSettings | None = None, pretrain_steps: int = 0
) -> Task:
    """A tiny policy with its reward model, judge and prompts.

    Args:
        seed: Seed of everything.
        kind: Kind of reward model, bag or trunk.
        dtype: Type of the base.
        lora: Settings of the adapter; a small default.
        pretrain_steps: Optimizer steps in which the base learns to write the reviews; 0 leaves it random and smaller.

    Returns:
        The task.

    >>> task = toy_task()
    >>> task.backbone.vocab_size <= 300, len(task.validation_prompts) >= 64
    (True, True)
    """
    reviews = toy_reviews(400, seed)
    texts = [r.text for r in reviews]
    if pretrain_steps:
        config = PretrainConfig(
            vocab_size=500, hidden_size=64, intermediate_size=128, layers=2, context=32, steps=pretrain_steps,
            warmup_steps=10, seed=seed,
        )  # fmt: skip
        tokenizer = train_tokenizer(texts, config.vocab_size)  # most of the words are whole
        model = new_model(config, len(tokenizer))
        fit(model, config, text_windows(tokenizer, texts, config.context), log=lambda _: None)
    else:
        model, tokenizer = tiny_model(texts, vocab_size=300, hidden_size=32, layers=2, seed=seed)
    backbone = Backbone(model.to(DTYPES[dtype]), tokenizer, lora or LoraSettings(r=4, alpha=8))
    epochs = dict(epochs=5, patience=5, lr=1e-2, batch_size=32)
    reward_config = RewardConfig(bag=BagSettings(**epochs), trunk=TrunkSettings(**epochs), eval_tokens=[16])
    reward_model, _ = train_reward(kind, reward_config, backbone, reviews[:200], reviews[200:280])
    judge = GoldJudge.fit([r.text for r in reviews[280:]], [r.label for r in reviews[280:]])
    prompts = [prompt_text(r.text) for r in reviews]
    return Task(backbone, reward_model, judge, prompts[:200], prompts[200:])
