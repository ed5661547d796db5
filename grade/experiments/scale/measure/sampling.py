"""Samplers: whether they draw from the policy, what training on their completions gives, and what they cost.

TRL is an optional extra (``pip install -e ".[peers]"``); without it its row is missing. A server's row needs one that
has the base: ``address``.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import chisquare

from grade.errors import InputError
from grade.experiments.intervals import interval, paired
from grade.experiments.training_runs import FIXED, SETTINGS, review_prompts
from grade.experiments.trl_runs import have_trl, trl_trainer
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_prompts
from grade.models.samplers import LOCAL, Sampler, make_sampler
from grade.models.scoring import completion_logps, predicting_hidden
from grade.results import progress
from grade.training.config import TrainConfig
from grade.training.load import load_task
from grade.training.run import run_training

PEER = "trl"
PROMPT, COMPLETION, GROUP = 12, 24, 8
"""P, T and G of the contest with the peer: prompts of at most 12 tokens, completions of exactly 24, groups of 8."""
BATCHES, ROUNDS = (8, 64), 5
"""Completions in its batches, and how often each is timed."""
BATCH = 1024
"""Completions that a sampler of `law_rows` is asked for at once."""
ADAPTER_NOISE = 0.05
"""Standard deviation of the noise on the adapter's weights."""


# ---- the law ----
def law_rows(n: int, model: str, samplers: Sequence[str]) -> list[tuple[str, int, float, float, float]]:
    """Chi-square of the second token of a completion, for which a sampler reads its cache, against its exact marginal.

    ``p(y_2) = sum_{y_1} p(y_1) p(y_2 | y_1)`` over the first tokens that do not end the completion, from whole passes.
    The policy's adapter is noise, so that a sampler without it would be seen. Of each sampler: draws, p, mean ratio and
    largest difference of its log-probabilities.
    """
    backbone = Backbone.load(model, lora=LoraSettings())
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in backbone.trainable_parameters():
            p.add_(ADAPTER_NOISE * torch.randn(p.shape, generator=noise))
    prompt = encode_prompts(backbone.tokenizer, ["The film"], PROMPT)
    expected, first = _second_token(backbone, prompt)
    rows, batches = [], -(-int(n / first) // BATCH) + 1  # some first tokens end the completion
    for name in samplers:
        sampler, generator = make_sampler(name), torch.Generator().manual_seed(0)
        sampler.use(sampler.publish(backbone))
        counts, mismatches = np.zeros(len(expected)), []
        for _ in progress(range(batches), f"batches of {name}"):
            prompts = prompt.repeat(BATCH)
            samples = sampler.sample(backbone, prompts, 2, generator)
            counts += np.bincount(samples.ids[:, 1][samples.mask[:, 1].bool()].numpy(), minlength=len(expected))
            with torch.no_grad():
                logps = completion_logps(backbone, prompts, samples.ids, samples.mask)
            mismatches.append(samples.mismatch(logps))
        sampler.close()
        ratio, largest = np.mean([f.mean_ratio for f in mismatches]), max(f.largest_difference for f in mismatches)
        rows.append((name, int(counts.sum()), chi_square(counts, expected), float(ratio), largest))
    return rows


@torch.no_grad()
def _second_token(backbone: Backbone, prompt: PromptBatch) -> tuple[np.ndarray, float]:
    """Probabilities [V] of the second token, given that there is one, and the probability that there is one."""
    vocab = backbone.vocab_size
    many, first = prompt.repeat(vocab), torch.arange(vocab).unsqueeze(1)
    hidden = predicting_hidden(backbone, many, torch.cat([first, first], 1))
    start = backbone.head(hidden[0, 0]).double().softmax(-1)
    start[list(backbone.eos_token_ids)] = 0.0
    second = torch.zeros(vocab, dtype=torch.float64)
    for rows in torch.arange(vocab).split(BATCH):
        second += start[rows] @ backbone.head(hidden[rows, 1]).double().softmax(-1)
    return (second / second.sum()).numpy(), float(start.sum())


# ---- what training gives ----
def training_rows(seeds: Sequence[int], samplers: Sequence[str], **changes: Any) -> list[dict[str, Any]]:
    """Held-out reward before and after the same training on completions of different samplers, seed by seed."""
    values = dict(
        FIXED, model="models/tiny", reward="models/reward/tiny/bag", gold="", method="rloo", max_prompt_length=PROMPT,
        max_completion_length=COMPLETION, min_completion_length=COMPLETION, per_device_train_batch_size=32, beta=0.3,
        learning_rate=3e-3, eval_strategy="no", eval_prompts=256, final_eval_prompts=256, kl_eval_prompts=0,
        report_to="none", output_dir="unused",
    )  # fmt: skip
    rows = []
    for seed, sampler in progress(list(itertools.product(seeds, samplers)), "training runs"):
        config = TrainConfig.parse(values | SETTINGS["rloo"] | {"seed": seed, "sampler": sampler} | changes)
        result = run_training(config, load_task(config))
        last = result.history[-1]
        figures = {name: last.get(f"train/sampler_{name}") for name in ("mean_ratio", "largest_difference")}
        rows.append(dict(seed=seed, sampler=sampler, before=result.before.reward.mean(),
                         after=result.after.reward.mean(), **figures))  # fmt: skip
    return rows


def training_differences(table: pd.DataFrame) -> pd.DataFrame:
    """Paired differences of the reward after training to the first sampler's, over seeds."""
    after = {name: dict(zip(part["seed"], part["after"], strict=True)) for name, part in table.groupby("sampler")}
    first, rows = table["sampler"].iloc[0], []
    for name in (name for name in table["sampler"].unique() if name != first):
        difference, p = paired(after[name], after[first])
        rows.append((name, *difference, p))
    return pd.DataFrame(rows, columns=["sampler", "difference", "stderr", "n", "p"])


# ---- what they cost ----
def sampling_seconds(model: str) -> list[tuple[int, int, str, float, float]]:
    """Seconds per completion of each sampler and of TRL's GRPO trainer, in one process of one thread, interleaved.

    All get the same prompts, in groups of `GROUP` as GRPO has them, and return `COMPLETION` tokens of each. TRL
    generates on its own path (``GRPOTrainer._generate_single_turn``: ``model.generate``), with its own copy of the
    base and LoRA of the same rank on the same layers. Tokenising and decoding count for no one. Of each: batch, round,
    sampler, seconds of the wall and of the CPU.
    """
    torch.set_num_threads(1)
    backbone = Backbone.load(model, lora=LoraSettings())
    texts, rows = review_prompts("data/reviews")[0], []
    with tempfile.TemporaryDirectory() as folder:
        for batch in BATCHES:
            prompts = encode_prompts(backbone.tokenizer, texts[: batch // GROUP], PROMPT).repeat(GROUP)
            work = {name: _of_sampler(make_sampler(name), backbone, prompts) for name in LOCAL}
            if have_trl():
                work[PEER] = _of_peer(model, backbone, prompts, folder)
            names = list(work)
            for number in progress(range(-1, ROUNDS), f"rounds of {batch} completions"):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    start = time.perf_counter(), time.process_time()
                    work[name](number)
                    spent = time.perf_counter() - start[0], time.process_time() - start[1]
                    rows += [(batch, number, name, *(s / batch for s in spent))] if number >= 0 else []
    return rows


def sampling_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Each sampler's seconds over TRL's, of sums over rounds, with 95 % jackknife intervals over rounds."""
    rows, peers = [], dict(iter(table[table["sampler"] == PEER].groupby("batch")))
    ours = table[(table["sampler"] != PEER) & table["batch"].isin(peers)]
    for (batch, name), part in ours.groupby(["batch", "sampler"], sort=False):
        row: dict[str, Any] = {"batch": batch, "sampler": name}
        for column, ratio in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")):
            a, b = (frame.sort_values("round")[column].to_numpy() for frame in (part, peers[batch]))
            estimate = interval(np.array([a.sum() / b.sum(), *((a.sum() - a) / (b.sum() - b))]), geometric=True)
            row |= {column: a.mean(), ratio: estimate.value, f"{ratio}_low": estimate.low}
            row[f"{ratio}_high"] = estimate.high
        rows.append(row)
    return pd.DataFrame(rows)


def _of_sampler(sampler: Sampler, backbone: Backbone, prompts: PromptBatch) -> Callable[[int], object]:
    noise = torch.Generator()
    return lambda number: sampler.sample(backbone, prompts, COMPLETION, noise.manual_seed(number + 1), COMPLETION)


def _of_peer(model: str, backbone: Backbone, prompts: PromptBatch, folder: str) -> Callable[[int], None]:
    from trl import GRPOConfig, GRPOTrainer

    ids = prompts.rows()
    arguments = partial(
        GRPOConfig, max_completion_length=COMPLETION, generation_kwargs={"min_new_tokens": COMPLETION},
        num_generations=GROUP, per_device_train_batch_size=len(ids), temperature=1.0, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    make = partial(GRPOTrainer, reward_funcs=lambda completions, **_: [0.0] * len(completions))
    columns = {"prompt": ["a"] * len(ids)}
    trainer = trl_trainer(model, backbone.dtype, make, arguments, columns, LoraSettings(), folder)

    def work(number: int) -> None:
        torch.manual_seed(number + 1)
        completions, _ = trainer._generate_single_turn(ids, None, {}, GROUP)
        if [len(tokens) for tokens in completions] != [COMPLETION] * len(ids):
            raise InputError("trl", "completions of another length", f"{len(ids)} of {COMPLETION} tokens")

    return work


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P of a chi-square test of counts; values that are expected less than five times are one cell.

    >>> round(chi_square(np.array([48, 52]), np.array([0.5, 0.5])), 3)     # (2^2 + 2^2) / 50 = 0.16, one degree
    0.689
    """
    counts, expected = np.asarray(counts, dtype=float), np.asarray(probabilities, dtype=float) * np.sum(counts)
    if counts[expected == 0].any():
        return 0.0
    small = expected < 5
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    used = expected > 0
    return float(chisquare(counts[used], expected[used]).pvalue)
