"""What is known of the steps since the last row of the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from grade.gradients.objective import GradientStep, sequence_mean
from grade.models.prompts import PromptBatch, decode

if TYPE_CHECKING:
    from grade.rewards.rewards import Scores


class Window:
    """Figures of microbatches, averaged when a row is logged, and their completions if those are wanted.

    Args:
        tokenizer: Decodes the completions that are kept; None: none are.

    Attributes:
        figures: Values of each figure since the last row.
        rows: Completions that were kept since then.
        completion_kl: KL a completion in nats, of each microbatch of the current step; empty between steps.
    """

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.figures: dict[str, list[Any]] = {}
        self.rows: list[dict[str, Any]] = []
        self.completion_kl: list[Tensor] = []

    def note(self, figures: dict[str, Tensor | float | None]) -> None:
        """Add one value of each figure; None is left out."""
        for name, value in figures.items():
            if value is not None:
                self.figures.setdefault(name, []).append(value)

    def note_step(self, step: GradientStep, prompts: PromptBatch, scores: Scores | None = None) -> None:
        """Add a microbatch: rewards, KL, lengths.

        Args:
            step: The engine's result.
            prompts: The prompt of each completion [B].
            scores: What its rewards gave, one by one; None where the reward is the policy's own.
        """
        mask = step.completion_mask
        self.completion_kl.append((step.kl.double() * mask).sum(-1).mean())
        self.note(
            {
                "reward": step.reward.mean(), "reward_std": step.reward.std(correction=0),
                "kl": sequence_mean(step.kl, mask).mean(), "loss": step.loss,
                "completions/mean_length": mask.sum(-1).double().mean(),
            }
        )  # fmt: skip
        if scores is not None:
            for name, values in scores.values.items():
                given = values[~values.isnan()]
                self.note({f"rewards/{name}/mean": given.mean(), f"rewards/{name}/std": given.std(correction=0)}
                          if len(given) else {})  # fmt: skip
            self.note({f"rewards/{name}/seconds": seconds for name, seconds in scores.seconds.items()})
            for name, values in scores.metrics.items():
                self.note({name: sum(values) / len(values)})
        if self.tokenizer is not None:
            self._keep(step, prompts, scores)

    def _keep(self, step: GradientStep, prompts: PromptBatch, scores: Scores | None) -> None:
        for i, (ids, mask) in enumerate(zip(step.completion_ids, step.completion_mask, strict=True)):
            row = {
                "prompt": decode(self.tokenizer, prompts.ids[i], prompts.mask[i]),
                "completion": decode(self.tokenizer, ids, mask), "reward": float(step.reward[i]),
            }  # fmt: skip
            if scores is not None:
                row |= {f"rewards/{name}": float(values[i]) for name, values in scores.values.items()}
                row |= {name: values[i] for name, values in scores.columns.items() if len(values) == len(step.reward)}
            self.rows.append(row)

    def drain(self, mean: Callable[[list[Any]], float]) -> dict[str, float]:
        """The mean of every figure; the window is empty afterwards.

        Args:
            mean: The mean of a figure's values, over all processes.
        """
        figures, self.figures = self.figures, {}
        return {name: mean(values) for name, values in figures.items()}

    def table(self, gather: Callable[[list[Any]], list[Any]]) -> pd.DataFrame:
        """The kept completions of all processes; none are kept afterwards.

        Args:
            gather: Joins the lists of all processes.
        """
        rows, self.rows = self.rows, []
        return pd.DataFrame(gather(rows))

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as plain numbers, with their type, in which they are averaged."""
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
