"""What a run logs: figures and completions since the last row, rows of ``history.csv``, the tokens that a reward likes.

`history_rows` is not a ``pandas.DataFrame(log_history)``: pandas makes floats of integers with gaps, and 64 is written
as 64.0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from grade.gradients.objective import GradientStep, sequence_mean
from grade.models.prompts import PromptBatch, decode

if TYPE_CHECKING:
    from grade.gradients.distilled.learner import DistilledGradient
    from grade.models.backbone import Backbone
    from grade.rewards.rewards import Scores
    from grade.training.collectives import Collectives

SHOWN = 20
"""Tokens at either end of `token_table`."""
TRAIN_COLUMNS = {
    "train/reward": "reward", "train/kl": "kl", "train/loss": "loss", "train/tau": "tau",
    "train/grad_norm": "grad_norm", "train/residual": "residual", "train/length": "completions/mean_length",
    "train/learning_rate": "learning_rate",
}  # fmt: skip
"""Columns of ``history.csv``, and what the Trainer's log calls them."""
METHOD_COLUMNS = {
    "train/clip_fraction": "clip_fraction", "train/value_loss": "value_loss", "train/beta": "beta",
    "train/residual_weight": "residual_weight", "train/sampler_mean_ratio": "sampler/mean_ratio",
    "train/sampler_largest_difference": "sampler/largest_difference",
}  # fmt: skip
"""Columns that only some methods or settings have; besides, whatever the log has below ``distilled/``."""
EVAL_COLUMNS = {
    f"val/{name}{column}": f"eval_{name}{logged}"
    for name, mean in (("reward", "_mean"), ("gold", "_mean"), ("kl", ""))
    for column, logged in ((mean, ""), ("_stderr", "_stderr"), ("_n", "_n"))
}


class LogBuffer:
    """Figures of microbatches, averaged when a row is logged, and their completions if a tokenizer decodes them.

    Attributes:
        figures: Values of each figure since the last row.
        rows: Completions since then.
        completion_kl: KL in nats per completion of each microbatch of the current step; empty between steps.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.figures: dict[str, list[Tensor | float]] = {}
        self.rows: list[dict[str, Any]] = []
        self.completion_kl: list[Tensor] = []

    def add(self, figures: dict[str, Tensor | float | None]) -> None:
        """Add one value of each figure; None is left out."""
        for name, value in figures.items():
            if value is not None:
                self.figures.setdefault(name, []).append(value)

    def add_step(self, step: GradientStep, prompts: PromptBatch, scores: Scores | None = None) -> None:
        """Add a microbatch: an engine's result, the prompt of each completion [B], and what each reward gave.

        There are no scores where the reward is the policy's own.
        """
        mask = step.completion_mask
        self.completion_kl.append((step.kl.double() * mask).sum(-1).mean())
        self.add(
            {
                "reward": step.reward.mean(), "reward_std": step.reward.std(correction=0),
                "kl": sequence_mean(step.kl, mask).mean(), "loss": step.loss,
                "completions/mean_length": mask.sum(-1).double().mean(),
            }
        )  # fmt: skip
        parts, columns = {}, {}
        if scores is not None:
            parts = scores.values
            columns = {name: values for name, values in scores.columns.items() if len(values) == len(step.reward)}
            for name, values in parts.items():
                given = values[~values.isnan()]
                if len(given):
                    std = given.std(correction=0)
                    self.add({f"rewards/{name}/mean": given.mean(), f"rewards/{name}/std": std})
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

    def drain(self, collectives: Collectives) -> dict[str, float]:
        """The mean of every figure over all processes; no figure is kept."""
        figures, self.figures = self.figures, {}
        return {name: collectives.mean(values) for name, values in figures.items()}

    def drain_rows(self, collectives: Collectives) -> pd.DataFrame:
        """The completions of all processes; none is kept."""
        rows, self.rows = self.rows, []
        return pd.DataFrame(collectives.gather(rows))

    def state(self) -> dict[str, Any]:
        """Plain values for `restore`; each number with the type in which it is averaged."""
        figures = {}
        for name, values in self.figures.items():
            tensors = [torch.as_tensor(value) for value in values]
            figures[name] = [[str(t.dtype).removeprefix("torch."), float(t)] for t in tensors]
        return {"figures": figures, "rows": self.rows}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.figures = {
            name: [torch.tensor(value, dtype=getattr(torch, dtype)) for dtype, value in values]
            for name, values in state["figures"].items()
        }
        self.rows = state["rows"]


def token_table(backbone: Backbone, learner: DistilledGradient) -> pd.DataFrame:
    """The `SHOWN` tokens that a distilled reward likes most and least; empty before the first fit.

    Only tokens of the kept completions are listed: the fit extrapolates to others. Columns are rank (1 is liked most,
    -1 least), token, id, value (the change of a completion's reward by one token, less its mean over those tokens) and
    count.
    """
    columns = ["rank", "token", "id", "value", "count"]
    values, counts = learner.liked_tokens(), learner.store.token_counts(backbone.vocab_size)
    if values is None:
        return pd.DataFrame(columns=columns)
    values = values.double().cpu()
    values = values - (values * counts).sum() / counts.sum()
    seen = (counts > 0).nonzero().flatten()
    order = seen[values[seen].argsort(descending=True)].tolist()
    ends = [(rank + 1, i) for rank, i in enumerate(order[:SHOWN])]
    least = order[max(SHOWN, len(order) - SHOWN) :]
    ends += [(rank - len(least), i) for rank, i in enumerate(least)]
    text = backbone.tokenizer.decode if backbone.tokenizer is not None else lambda ids: str(ids[0])
    rows = [(rank, text([i]), i, float(values[i]), int(counts[i])) for rank, i in ends]
    return pd.DataFrame(rows, columns=columns)


def history_rows(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``history.csv`` from a Trainer's ``log_history``: each step's figures, with its evaluation's."""
    table: dict[int, dict[str, Any]] = {}
    for logged in log_history:
        if "loss" in logged:
            row = {"step": logged["step"], "samples": logged["num_samples"], "seconds": logged["seconds"]}
            row |= {column: logged.get(name) for column, name in TRAIN_COLUMNS.items()}
            row |= {column: logged[name] for column, name in METHOD_COLUMNS.items() if name in logged}
            # Sorted, as rows of a checkpoint are.
            row |= {f"train/{name}": logged[name] for name in sorted(logged) if name.startswith("distilled/")}
            row["train/seconds"] = logged["step_time"]
        elif "eval_reward" in logged:
            row = {} if logged["step"] else {"step": 0, "samples": 0, "seconds": 0.0}
            row |= {column: logged[name] for column, name in EVAL_COLUMNS.items() if name in logged}
        else:
            continue
        table[logged["step"]] = table.get(logged["step"], {}) | row
    return [table[step] for step in sorted(table)]
