"""Observers of a backbone, which are told which phase runs and what is created in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from transformers import DynamicCache


class Watcher(Protocol):
    """Observer of a backbone's work, such as `grade.memory.live.LiveTracker`."""

    def during(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """A context that covers a phase."""

    def tag(self, tensors: Iterable[Tensor], category: Any) -> None:
        """Say what tensors are for."""


class WatchedCache(DynamicCache):
    """A key-value cache that reports its tensors to a watcher as they are created."""

    def __init__(self, watcher: Watcher, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._watcher = watcher

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `DynamicCache.update`."""
        result = super().update(*args, **kwargs)
        self._watcher.tag(result, "kv cache")
        return result
