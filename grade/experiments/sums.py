"""A policy that is right about some sums: a tiny Llama that has learned addition from lines of which most are wrong.

Its reward is a verifier's 0 or 1, the case of which a function of embeddings should explain least: which token is
right depends on the prompt. The lines are "12+7=19", and a wrong answer is one off in one digit, so the policy's most
probable answer is right nine times of ten, but its samples are right only two times of five: there is something to
learn from most prompts.

A prompt is "a+b=" and a completion has `ANSWER_TOKENS` tokens at most: the digits of the answer, then the end.

A policy that reads hints (``hinted``) has learned lines of which half begin with the sum, "19=12+7=19", and are wrong
half as often.
"""

import functools
import tempfile
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grade.data.tiny_lm import PretrainConfig, fit, new_model
from grade.models.adapter import LoraSettings

ANSWER_TOKENS = 3
"""T: two digits and the end."""
LARGEST = 49
"""Largest summand: a sum has two digits at most."""
WRONG = 0.7
"""Share of lines with a wrong answer."""
HELD_OUT = 0.2
"""Share of the pairs that are neither learned nor trained on."""
STEPS, BATCH = 400, 128
"""Optimizer steps, and lines per step: about ten seconds on one core."""
OFFSETS = (-10, -1, 1, 10)
"""What a wrong answer is off by."""
HINTED_WRONG, HINTED_OFFSETS = 0.75, (-20, -10, -2, -1, 1, 2, 10, 20)
"""The same of lines with hints."""

LORA = LoraSettings(
    r=32, alpha=64,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
)  # fmt: skip
"""An adapter that can learn sums: with fewer parameters no method does."""


def _pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of summands in random order: those to learn and train on, and those held out."""
    size = LARGEST + 1
    order = np.random.default_rng(0).permutation(size * size)
    pairs = [(int(number) // size, int(number) % size) for number in order]
    cut = round(HELD_OUT * len(pairs))
    return pairs[cut:], pairs[:cut]


def sum_prompts() -> tuple[list[str], list[str]]:
    """Prompts "a+b=" of `_pairs`."""
    train, held_out = ([f"{a}+{b}=" for a, b in pairs] for pairs in _pairs())
    return train, held_out


def sums_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each digit, "+" and "=", besides the end (id 0) and padding (id 1); decoding adds no spaces."""
    vocabulary = {token: number for number, token in enumerate(("<end>", "<pad>", *"0123456789+="))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@functools.cache
def sums_folder(steps: int = STEPS, hinted: bool = False) -> tempfile.TemporaryDirectory:
    """Folder of the policy, or of the one that reads hints, which is trained when it is first asked for."""
    tokenizer = sums_tokenizer()
    width = len(f"{LARGEST}+{LARGEST}=") + ANSWER_TOKENS + (len(f"{2 * LARGEST}=") if hinted else 0)
    settings = PretrainConfig(
        hidden_size=64, intermediate_size=128, layers=2, max_positions=4 * width, context=width - 1, batch_size=BATCH,
        steps=steps, muon_lr=0.02, adamw_lr=0.01, warmup_steps=min(20, steps - 1), seed=0,
    )  # fmt: skip
    # Every line is seen once: what is learned is the share of right answers, not which lines are wrong.
    rows = tokenizer(_lines(_pairs()[0], steps * BATCH, hinted))["input_ids"]
    windows = torch.tensor([row + [tokenizer.eos_token_id] * (width - len(row)) for row in rows])
    with torch.random.fork_rng(devices=[]):  # the global state is the caller's
        model = new_model(settings, len(tokenizer))
        fit(model, settings, windows, log=lambda _: None)
    folder = tempfile.TemporaryDirectory()
    model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder


def _lines(pairs: Sequence[tuple[int, int]], n: int, hinted: bool) -> list[str]:
    """N lines "a+b=c" of random pairs; c is wrong in a share of them: the sum plus an offset, never negative.

    With hints half of them have the sum and "=" in front, and are wrong half as often.
    """
    rng = np.random.default_rng((0, 2 if hinted else 1))  # not the split's
    a, b = np.array(pairs)[rng.integers(len(pairs), size=n)].T
    hints = rng.random(n) < 0.5 if hinted else np.zeros(n, dtype=bool)
    share, offsets = (HINTED_WRONG, HINTED_OFFSETS) if hinted else (WRONG, OFFSETS)
    wrong = rng.random(n) < share * np.where(hints, 0.5, 1.0)
    offset = rng.choice(offsets, n) * wrong
    answers = a + b + np.where(a + b + offset >= 0, offset, -offset)
    rows = zip(a, b, answers, hints, strict=True)
    return [f"{a + b}={a}+{b}={c}" if hint else f"{a}+{b}={c}" for a, b, c, hint in rows]
