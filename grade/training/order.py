"""Rows of datasets, in the order of training and of evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class PromptOrder(Sampler[int]):
    """Rows in the order of training: shuffled passes over the dataset, one after the other, without a cut.

    Args:
        rows: Rows of the dataset.
        total: Rows that training needs.
        seed: Seed of the order; None: the dataset's own order.
    """

    def __init__(self, rows: int, total: int, seed: int | None) -> None:
        self.rows, self.total, self.seed = rows, total, seed

    def __len__(self) -> int:
        """Rows that training needs."""
        return self.total

    def __iter__(self) -> Iterator[int]:
        """Every row once in each pass."""
        rng = None if self.seed is None else np.random.default_rng([self.seed, 1])
        left = self.total
        while left > 0:
            order = range(self.rows) if rng is None else rng.permutation(self.rows).tolist()
            yield from order[:left]
            left -= self.rows


class FirstRows(Sequence):
    """The first n rows of a dataset.

    Args:
        dataset: Rows.
        n: How many.
    """

    def __init__(self, dataset: Any, n: int) -> None:
        self.dataset, self.n = dataset, n

    def __len__(self) -> int:
        """N."""
        return self.n

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        """Row i."""
        return self.dataset[i]


def named_sets(dataset: Any) -> dict[str, Any]:
    """Datasets by name; a single one is called eval, none gives none."""
    return dataset if isinstance(dataset, dict) else {} if dataset is None else {"eval": dataset}
