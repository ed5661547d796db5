"""What a run logs: figures and completions since the last row, and rows of ``history.csv``.

``kl`` is a mean over each completion's tokens, as TRL logs it; ``kl_per_completion``, which the lines show, and
``kl_budget`` are in nats per completion.

`history_rows` is not a ``pandas.DataFrame(log_history)``: pandas makes floats of integers with gaps, and 64 is written
as 64.0.
"""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm
from transformers import ProgressCallback

from grade.errors import InputError
from grade.gradients.objective import GradientStep, relative, sequence_mean
from grade.models.prompts import PromptBatch, decode
from grade.models.sampling import is_eos
from grade.results import is_timed, timeless, write_history
from grade.training.evaluate import MEANS, Evaluation

logger = logging.getLogger(__name__)

FIGURES = ("reward", "kl", "loss", "tau", "grad_norm", "residual", "completions/mean_length", "learning_rate")
"""Of the Trainer's log, in ``history.csv`` as ``train/<name>`` or as in `RENAMED`."""
METHOD_FIGURES = (
    "clip_fraction", "value_loss", "kl_budget", "kl_scale", "tilt/r2", "sampler/mean_ratio",
    "sampler/largest_difference",
)  # fmt: skip
"""Those that only some methods or settings have."""
_RESERVED = {
    "log_metric": {*FIGURES, *METHOD_FIGURES, "reward_std", "frac_reward_zero_std", "completions/clipped_ratio",
                   "kl_per_completion", "step", "step_time", "seconds", "epoch", "num_samples", "entropy"},
    "log_extra": {"prompt", "completion", "reward"},
}  # fmt: skip
"""Names by which reward functions cannot log."""
RENAMED = {
    "completions/mean_length": "length", "tilt/r2": "tilt_r2", "sampler/mean_ratio": "sampler_mean_ratio",
    "sampler/largest_difference": "sampler_largest_difference",
}  # fmt: skip


class LogBuffer:
    """Figures of microbatches, averaged when a row is logged, and their completions if a tokenizer decodes them.

    What no function scored has no part in means of rewards. ``entropy`` is the mean over all completions' tokens, in
    nats per token, of the entropy of the policy that sampled, at the run's temperature; like KL it is of the whole
    distribution, with end-of-sequence where ``min_completion_length`` forbids it. ``ends`` are the policy's
    end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any = None, ends: tuple[int, ...] = ()) -> None:
        self.tokenizer, self.ends = tokenizer, ends
        self.warned = False
        self.figures: dict[str, list[Tensor | float]] = {}  # values since the last row
        self.rows: list[dict[str, Any]] = []  # completions since then

    def add(self, figures: dict[str, Tensor | float | None]) -> None:
        """Add one value of each figure; None is left out."""
        for name, value in figures.items():
            if value is not None:
                self.figures.setdefault(name, []).append(value)

    def add_step(self, step: GradientStep, prompts: PromptBatch) -> None:
        """Add a microbatch: an engine's result, and the prompt of each completion [B]."""
        mask, reward = step.completion_mask, step.reward[~step.reward.isnan()]
        if len(reward):
            self.add({"reward": reward.mean(), "reward_std": reward.std(correction=0)})
        kl, whole = sequence_mean(step.kl, mask).mean(), step.kl.double().sum(-1).mean()
        clipped = ~(is_eos(step.completion_ids, self.ends) & mask.bool()).any(-1)
        entropy = None if step.entropy is None else step.entropy.double().sum(-1).mean()  # of a completion, see `drain`
        self.add({"kl": None if kl.isnan() else kl, "kl_per_completion": None if kl.isnan() else whole,
                  "loss": step.loss, "entropy": entropy,
                  "completions/mean_length": mask.sum(-1).double().mean(),
                  "completions/clipped_ratio": clipped.double().mean()})  # fmt: skip
        parts, columns, scores = {}, {}, step.scores
        if scores is not None:
            for field, logged in (("log_metric", scores.metrics), ("log_extra", scores.columns)):
                for name in logged:
                    if name in _RESERVED[field] or name.startswith("rewards/"):
                        raise InputError(field, name, "another name: the trainer logs its own by this one")
            parts, columns = scores.values, scores.columns
            for name, values in parts.items():
                scored = values[~values.isnan()]
                if len(scored):
                    std = scored.std(correction=0)
                    self.add({f"rewards/{name}/mean": scored.mean(), f"rewards/{name}/std": std})
            self.add({f"rewards/{name}/seconds": seconds for name, seconds in scores.seconds.items()})
            self.add({name: sum(values) / len(values) for name, values in scores.metrics.items()})
        if self.tokenizer is not None:
            for i, (ids, kept) in enumerate(zip(step.completion_ids, mask, strict=True)):
                row = {
                    "prompt": decode(self.tokenizer, prompts.ids[i], prompts.mask[i]),
                    "completion": decode(self.tokenizer, ids, kept), "reward": float(step.reward[i]),
                }  # fmt: skip
                row |= {f"rewards/{name}": float(values[i]) for name, values in parts.items()}
                self.rows.append(row | {name: values[i] for name, values in columns.items()})

    def add_groups(self, rewards: Tensor) -> None:
        """Add the share of prompts whose G > 1 completions have equal rewards [N, G]; warn once where all have."""
        if rewards.shape[1] < 2:
            return
        equal = ~relative(rewards).nan_to_num(0.0).bool().any(1)
        self.add({"frac_reward_zero_std": equal.double().mean()})
        if equal.all() and not self.warned:
            logger.warning("rewards: those of each prompt's completions are equal, so a step has nothing to learn from")
            self.warned = True

    def drain(self, mean: Callable[[list[Tensor | float]], float]) -> dict[str, float]:
        """The mean of every figure; no figure is kept."""
        figures, self.figures = self.figures, {}
        names = dict.fromkeys(gather_object(list(figures)))  # some process may have had no reward
        drained = {name: mean(figures.get(name, [])) for name in names}
        if "entropy" in drained:  # a mean over tokens, whatever microbatch and process has them
            drained["entropy"] /= drained["completions/mean_length"]
        return drained

    def drain_rows(self) -> pd.DataFrame:
        """The completions of all processes; none is kept."""
        rows, self.rows = self.rows, []
        return pd.DataFrame(gather_object(rows))


def history_rows(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``history.csv`` from a Trainer's ``log_history``: each step's figures, with its evaluation's."""
    table: dict[int, dict[str, Any]] = {}
    for logged in log_history:
        if "loss" in logged:
            row = {"step": logged["step"], "samples": logged["num_samples"], "seconds": logged["seconds"]}
            own = [name for name in METHOD_FIGURES if name in logged]
            row |= {f"train/{RENAMED.get(name, name)}": logged.get(name) for name in (*FIGURES, *own)}
            row["train/seconds"] = logged["step_time"]
        elif "eval_reward" in logged and "val/reward_mean" not in table.get(logged["step"], {}):  # else of other rows
            row = {} if logged["step"] else {"step": 0, "samples": 0, "seconds": 0.0}
            for name, mean in MEANS.items():
                if f"eval_{name}" in logged:
                    row[f"val/{mean}"] = logged[f"eval_{name}"]
                    row |= {f"val/{name}_{part}": logged.get(f"eval_{name}_{part}") for part in ("stderr", "n")}
        else:
            continue
        table[logged["step"]] = table.get(logged["step"], {}) | row
    return [table[step] for step in sorted(table)]


def write_log(folder: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows as ``history.csv``, with their times in ``timings.csv``."""
    for file, timed in (("history.csv", False), ("timings.csv", True)):
        parts = [{k: v for k, v in row.items() if k == "step" or is_timed(k) == timed} for row in rows]
        write_history(Path(folder) / file, parts)


class Lines(ProgressCallback):
    """A short line for every row of the log, with one completion after an evaluation.

    Lines that tqdm writes, as by default, stand above a bar where somebody sees it.
    """

    def __init__(self, evaluations: Mapping[int, Evaluation], write: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.evaluations, self.bar, self.write = evaluations, write is None, write or tqdm.write

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the bar, which the base class moves and closes."""
        hidden = not self.bar or timeless() or not state.is_world_process_zero
        hidden = hidden or None  # None: where there is no terminal
        self.training_bar = tqdm(total=state.max_steps, desc="training", leave=False, disable=hidden)
        self.current_step = 0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the line, above the bar."""
        row = logs or {}
        names = ("reward", "kl_per_completion", "grad_norm", "eval_reward", "eval_gold", "eval_kl_per_completion")
        figures = "  ".join(f"{name} {row[name]:.4g}" for name in names if row.get(name) is not None)
        if not figures or not state.is_world_process_zero:
            return
        seconds = "" if timeless() else f"  {row['seconds']:7.1f} s" if "seconds" in row else " " * 11
        self.write(f"step {state.global_step:>4}/{state.max_steps}{seconds}  {figures}")
        evaluation = self.evaluations.get(state.global_step)
        if "eval_reward" in row and evaluation is not None:
            text = " ".join(f"{evaluation.prompts[0]}|{evaluation.completions[0]}".split())
            self.write(f"  {textwrap.shorten(text, 100)}  reward {evaluation.reward[0]:.4g}")
