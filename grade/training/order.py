"""Which rows of a dataset, in which order, the microbatches of a run are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from grade.training.config import GradeConfig


class Order:
    """Shuffled passes over all rows: the same whatever the number of processes, and wherever a run was resumed.

    Microbatches of a step are numbered over all processes.
    """

    def __init__(self, rows: int, config: GradeConfig) -> None:
        self.rows, self.config = rows, config
        self._passes: list[list[int]] = []  # numbers of rows, in every pass so far
        self._shuffler = np.random.default_rng([config.seed, 1])

    def microbatches(self) -> list[int]:
        """Numbers of this process's microbatches: those with completions of one prompt follow each other."""
        config = self.config
        together = max(1, config.group // config.per_device_train_batch_size)
        starts = range(config.process_index * together, config.microbatches, config.world_size * together)
        return [start + number for start in starts for number in range(together)]

    def prompts(self, step: int, number: int) -> list[int]:
        """Rows of the prompts in a microbatch of a step from 1: B / G, or one that it shares with others."""
        batch, group = self.config.per_device_train_batch_size, self.config.group
        start, size = ((step - 1) * self.config.microbatches + number) * batch // group, max(1, batch // group)
        while len(self._passes) * self.rows < start + size:
            self._passes.append(self._shuffler.permutation(self.rows).tolist())
        return [self._passes[i // self.rows][i % self.rows] for i in range(start, start + size)]
