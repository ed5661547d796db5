"""A policy that is right about some sums: a tiny Llama that has learned addition from lines of which most are wrong.

Its reward is a verifier's 0 or 1, the case of which a function of embeddings should explain least: which token is
right depends on the prompt. The lines are "12+7=19", and a wrong answer is one off in one digit, so the policy's most
probable answer is right nine times of ten, but its samples are right only two times of five: there is something to
learn from most prompts.

A prompt is "a+b=" and a completion has `ANSWER_TOKENS` tokens at most: the digits of the answer, then the end.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from grade.config import Config
from grade.data.base_model import save_model
from grade.data.tiny_lm import PretrainConfig, fit, new_model
from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone

ANSWER_TOKENS = 3
"""T: two digits and the end."""
_SPECIAL = ("<end>", "<pad>")  # ids 0 and 1, as `new_model` has them
_SYMBOLS = "0123456789+="
_OFFSETS = (-10, -1, 1, 10)
_FILE = "sums.json"


class SumsConfig(Config):
    """The sums, and how the policy learns them. The defaults take about ten seconds on one core."""

    largest: int = Field(49, ge=1, le=49, description="largest summand; a sum has two digits at most")
    wrong: float = Field(0.7, ge=0, lt=1, description="share of lines with a wrong answer")
    heldout: float = Field(0.2, gt=0, lt=1, description="share of the pairs that are neither learned nor trained on")
    steps: int = Field(400, ge=2, description="optimizer steps")
    batch_size: int = Field(128, ge=1, description="lines a step")
    hidden_size: int = Field(64, ge=8, multiple_of=8, description="width D")
    layers: int = Field(2, ge=1, description="number of layers")
    seed: int = Field(0, ge=0, description="seed of weights, lines and split")


@dataclass(frozen=True)
class Sums:
    """The policy with its prompts.

    Attributes:
        backbone: The policy, with a fresh adapter.
        train: Prompts "a+b=" in random order.
        heldout: Others, which the base has not seen either.
    """

    backbone: Backbone
    train: list[str]
    heldout: list[str]


def build_sums(folder: str | Path, config: SumsConfig | None = None) -> None:
    """Train the policy and write its folder, whole or not at all, unless it is there already.

    `Backbone.load` takes the folder; ``sums.json`` in it holds settings and prompts.

    Args:
        folder: Target folder.
        config: Settings; default: those of `SumsConfig`.

    Raises:
        InputError: If there is something else: a folder of other settings, or one that is no policy of sums.
    """
    config, target = config or SumsConfig(), Path(folder)
    if target.exists():
        _check_settings(target, config)
        return
    train, heldout = split_pairs(config)
    model, tokenizer = _trained(config, train)
    Backbone(model, tokenizer)  # raises if it cannot be supported, before anything is written
    prompts = {name: [f"{a}+{b}=" for a, b in pairs] for name, pairs in (("train", train), ("heldout", heldout))}
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        save_model(model, tokenizer, staging / "model")
        about = json.dumps({"settings": config.model_dump()} | prompts)
        (staging / "model" / _FILE).write_text(about + "\n", encoding="utf-8")
        os.rename(staging / "model", target)
    except OSError:
        if not target.exists():
            raise
        _check_settings(target, config)  # another process was faster
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def load_sums(folder: str | Path, lora: LoraSettings | None = None, seed: int = 0) -> Sums:
    """The policy from its folder, with a new adapter, and the prompts.

    Args:
        folder: Written by `build_sums`.
        lora: Settings of the adapter; default: those of `LoraSettings`.
        seed: Seed of the adapter.

    Raises:
        InputError: If there is no such folder.
    """
    about = _read(Path(folder))
    backbone = Backbone.load(folder, lora=lora or LoraSettings(), seed=seed)
    return Sums(backbone, about["train"], about["heldout"])


def sums_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, "+" and "=", besides the end (id 0) and padding (id 1); decoding adds no spaces."""
    vocabulary = {token: number for number, token in enumerate((*_SPECIAL, *_SYMBOLS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    end, pad = _SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)


def split_pairs(config: SumsConfig) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of summands in random order, those to learn and train on, and those held out."""
    size = config.largest + 1
    order = np.random.default_rng(config.seed).permutation(size * size)
    pairs = [(int(number) // size, int(number) % size) for number in order]
    cut = round(config.heldout * len(pairs))
    return pairs[cut:], pairs[:cut]


def lines(config: SumsConfig, pairs: Sequence[tuple[int, int]], n: int) -> list[str]:
    """Lines "a+b=c" of random pairs; c is wrong in a share of them.

    A wrong answer is the right one plus or minus 1 or 10, never negative.

    Args:
        config: Share and seed.
        pairs: Pairs of summands.
        n: Lines.
    """
    rng = np.random.default_rng((config.seed, 1))  # not the split's
    chosen, wrong = rng.integers(len(pairs), size=n), rng.random(n) < config.wrong
    offsets = rng.choice(_OFFSETS, n) * wrong
    made = []
    for number, offset in zip(chosen.tolist(), offsets.tolist(), strict=True):
        a, b = pairs[number]
        made.append(f"{a}+{b}={a + b + (offset if a + b + offset >= 0 else -offset)}")
    return made


def line_windows(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], width: int) -> Tensor:
    """Token ids [n, width] of lines, each filled up with ends."""
    rows = tokenizer(list(texts))["input_ids"]
    return torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])


def _trained(config: SumsConfig, pairs: Sequence[tuple[int, int]]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    tokenizer = sums_tokenizer()
    width = len(f"{config.largest}+{config.largest}=") + ANSWER_TOKENS
    settings = PretrainConfig(
        hidden_size=config.hidden_size, intermediate_size=2 * config.hidden_size, layers=config.layers,
        max_positions=4 * width, context=width - 1, batch_size=config.batch_size, steps=config.steps,
        muon_lr=0.02, adamw_lr=0.01, warmup_steps=min(20, config.steps - 1), seed=config.seed,
    )  # fmt: skip
    # Every line is seen once: what is learned is the share of right answers, not which lines are wrong.
    windows = line_windows(tokenizer, lines(config, pairs, config.steps * config.batch_size), width)
    with torch.random.fork_rng(devices=[]):  # the global state is the caller's
        model = new_model(settings, len(tokenizer))
        fit(model, settings, windows, log=lambda _: None)
    return model, tokenizer


def _check_settings(folder: Path, config: SumsConfig) -> None:
    written = _read(folder)["settings"]
    if written != config.model_dump():
        raise InputError("folder of sums", str(folder), f"a new one, or one with the settings {config.model_dump()}")


def _read(folder: Path) -> dict:
    try:
        return json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError("folder of sums", str(folder), f"a folder that build_sums wrote, with {_FILE}") from None
