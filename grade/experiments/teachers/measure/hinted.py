"""Training runs on sums: a reward of 0 or 1, of which tokens explain nothing, and a base that reads hints.

| method | |
|---|---|
| ``rloo`` | the baseline |
| ``rloo_again`` | the same with another seed: what a comparison shows where there is no difference |
| ``auto`` | the distilled reward without a teacher |
| ``hinted`` | with family `hinted`: the base that has read the sum predicts the reward, and rewards weigh it |
| ``sibling`` | the same with the best other answer of the step as hint, if it is better than the worst |
| ``nonsense`` | the same with another number as hint |
| ``weight_1`` | method `teacher`: the base that has read the sum is learned, whatever the rewards |

The last is on-policy self-distillation (OPSD, SDPO; compared in arXiv:2606.04036), with the base as teacher.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from grade.config import Config
from grade.experiments.measured import Seeds, Size
from grade.experiments.reward_runs import fit_figures
from grade.experiments.rewards import right_sum
from grade.experiments.sums import ANSWER_TOKENS, LARGEST, LORA, sum_prompts
from grade.experiments.training_runs import FIXED, Bench, Run
from grade.gradients.methods import FAMILIES, HINTED, Rate
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import encode_examples
from grade.models.sampling import generate
from grade.models.teacher import with_context
from grade.rewards.functions import FunctionReward
from grade.stats import Estimate
from grade.training.evaluate import Evaluation
from grade.training.load import Task

_READING = {"teacher": "base", "teacher_context": "{answer}="}
_PREDICTING = {"method": "distilled", "distil_families": [*FAMILIES, HINTED]}
METHODS: dict[str, dict[str, Any]] = {
    "rloo": {"method": "rloo"},
    "rloo_again": {"method": "rloo"},
    "auto": {"method": "distilled"},
    "hinted": _PREDICTING | _READING,
    "sibling": _PREDICTING | _READING | {"teacher_context": "{sibling}="},
    "nonsense": _PREDICTING | _READING | {"teacher_context": "{other}="},
    "weight_1": {"method": "teacher"} | _READING,
}
"""Settings of the methods."""
HintMethod = Literal[tuple(METHODS)]
AGAIN = 1000
"""What `rloo_again` adds to a seed."""
NAMES = ("method", "seed", "beta", "learning_rate", "completions")
"""Columns that name a run."""


class HintedRuns(Config):
    """The runs: every method with every seed."""

    methods: dict[HintMethod, dict[str, Any]] = Field(
        {"rloo": {}, "hinted": {}, "nonsense": {}}, min_length=1
    )  # its settings beside the shared ones, with the names of grade train
    seeds: Seeds = Field([0, 1], min_length=1)  # one run of each method
    pretraining_steps: Size = 20  # of the base
    completions: int = Field(8, ge=2, multiple_of=2)  # a step, two of each prompt
    steps: Size = 2  # optimizer steps
    learning_rate: Rate = 4e-3  # falling to 0
    beta: float = Field(0.3, ge=0)  # weight of KL
    eval_every: Size = 2  # steps between evaluations
    eval_repeats: Size = 1  # completions of each of 500 held-out prompts in an evaluation


def sum_rows(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of prompts "a+b=": with the sum as ``answer``, and a number that says nothing of it as ``other``.

    >>> sum_rows(["12+7="])
    [{'prompt': '12+7=', 'answer': 19, 'other': 6}]
    """
    rows = []
    for prompt in prompts:
        a, b = map(int, prompt.removesuffix("=").split("+"))
        rows.append({"prompt": prompt, "answer": a + b, "other": (7 * a + 3 * b) % (2 * LARGEST + 1)})
    return rows


class _Right:
    """Judges texts "a+b=c": 1 where c is the sum."""

    def score(self, texts: Sequence[str]) -> np.ndarray:
        split = [text.partition("=") for text in texts]
        return np.array(right_sum([f"{sum_}=" for sum_, _, _ in split], [c for *_, c in split]), dtype=float)


@dataclass(frozen=True)
class HintedBench(Bench):
    """The base that reads hints, its prompts, and whether sums are right as judge of all methods."""

    runs: HintedRuns = HintedRuns()

    def load(self, policy: str) -> Task:
        """The policy with its prompts."""
        train, held_out = map(sum_rows, sum_prompts())
        return Task(Backbone.load(self.bases[policy], lora=LORA), None, _Right(), train,
                    held_out * self.runs.eval_repeats)  # fmt: skip

    def adapter(self, policy: str) -> LoraSettings:
        """The adapter of every run."""
        return LORA

    def reward(self, run: Run, backbone: Backbone) -> FunctionReward | None:
        """Whether the sum is right; the teacher alone has no reward."""
        return None if run.values["method"] == "teacher" else FunctionReward(right_sum, "right_sum")

    def evaluated(self, run: Run, row: Mapping[str, Any], evaluation: Evaluation) -> dict[str, Any]:
        """What the distilled method says about its fit."""
        return fit_figures(row)


def hinted_runs(runs: HintedRuns) -> list[Run]:
    """All runs, seed by seed."""
    made = []
    for seed, (method, own) in product(runs.seeds, runs.methods.items()):
        values = FIXED | {
            "lr_scheduler_type": "linear", "max_completion_length": ANSWER_TOKENS,
            "num_generations": 2, "per_device_train_batch_size": runs.completions, "max_steps": runs.steps,
            "learning_rate": runs.learning_rate, "beta": runs.beta, "eval_steps": runs.eval_every,
            "eval_on_start": True, "eval_prompts": None, "final_eval_prompts": None, "kl_eval_prompts": 500,
            "per_device_eval_batch_size": 500, "seed": seed + AGAIN * (method == "rloo_again"),
        } | METHODS[method] | own  # fmt: skip
        names = (method, seed, values["beta"], values["learning_rate"], values["per_device_train_batch_size"])
        made.append(Run(dict(zip(NAMES, names, strict=True)), values))
    return made


@torch.no_grad()
def hint_table(folder: str, repeats: int) -> pd.DataFrame:
    """Share of right sums that the base samples with each hint in front: columns hint, right, stderr and n."""
    base, rows, table = Backbone.load(folder), sum_rows(sum_prompts()[1]) * repeats, []
    for hint in ("none", "answer", "other"):
        context = "" if hint == "none" else f"{{{hint}}}="
        prompts = encode_examples(base.tokenizer, [with_context(row, context) for row in rows], warn_raw=False)
        ids, _ = generate(base, prompts, ANSWER_TOKENS, torch.Generator().manual_seed(0))
        texts = base.tokenizer.batch_decode(ids, skip_special_tokens=True)
        right = Estimate.of(right_sum([row["prompt"] for row in rows], texts))
        table.append((hint, right.mean, right.stderr, len(rows)))
    return pd.DataFrame(table, columns=["hint", "right", "stderr", "n"])
