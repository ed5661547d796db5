"""What processes do together: sums, means, lists, and failing with one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grade.errors import InputError
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch

Result = TypeVar("Result")


class Together:
    """Collective operations that cost nothing in a single process.

    Args:
        accelerator: The processes.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator, self.several = accelerator, accelerator.num_processes > 1

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Do a piece of work that may fail on some processes; then it fails on all, instead of leaving them waiting.

        Args:
            work: Must not communicate itself.

        Returns:
            Its result.

        Raises:
            InputError: This process's own, or the first of the others'.
        """
        if not self.several:
            return work()
        error, result = None, None
        try:
            result = work()
        except InputError as raised:
            error = raised
        told = self.gather([None if error is None else (error.field, error.value, error.allowed)])
        if error is not None:
            raise error
        for other in told:
            if other is not None:
                raise InputError(*other)
        return result

    def gather(self, rows: list[Any]) -> list[Any]:
        """The lists of all processes, joined in order of rank."""
        return gather_object(rows) if self.several else rows

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return self.accelerator.reduce(value, reduction="sum") if self.several else value

    def mean(self, values: list[Tensor]) -> float:
        """The mean of values over processes, each of which has equally many."""
        mean = torch.stack([torch.as_tensor(v).detach().cpu() for v in values]).mean()
        if not self.several:
            return float(mean)
        return float(self.accelerator.reduce(mean.to(self.accelerator.device), reduction="mean"))

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any process."""
        return bool(self.sum(torch.tensor(int(flag), device=self.accelerator.device))) if self.several else flag

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.accelerator.wait_for_everyone()


@dataclass(frozen=True)
class SharedObjective(Objective):
    """An objective whose scores fail together: a reward that fails on one process ends all.

    Attributes:
        together: The processes. All must score equally often.
        scores: What the rewards gave, one by one, for each call.
    """

    together: Together | None = None
    scores: list[Any] = field(default_factory=list)

    def score(self, backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """As `Objective.score`."""
        reward = self.together(lambda: Objective.score(self, backbone, prompts, ids, mask))
        self.scores.append(self.reward_model.last)
        return reward
