"""Sums, means and lists over processes; where one process fails, the launcher (torchrun) ends the others."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor


class Collectives:
    """Collective operations that cost nothing in a single process."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.several = accelerator, accelerator.num_processes > 1

    def gather(self, rows: list[Any]) -> list[Any]:
        """The lists of all processes, joined in order of rank."""
        return gather_object(rows) if self.several else rows

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return self.accelerator.reduce(value, reduction="sum") if self.several else value

    def mean(self, values: list[Tensor | float]) -> float:
        """The mean of values over processes, each of which has equally many."""
        mean = torch.stack([torch.as_tensor(v).detach().cpu() for v in values]).mean()
        if not self.several:
            return float(mean)
        return float(self.accelerator.reduce(mean.to(self.accelerator.device), reduction="mean"))

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any process."""
        return bool(self.sum(torch.tensor(int(flag), device=self.accelerator.device))) if self.several else flag
