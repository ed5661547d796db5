"""Tables of which each process may hold some rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor


@contextlib.contextmanager
def whole(*tables: Tensor) -> Iterator[None]:
    """Within this context all rows of those tables that are sharded are here: gathered once for many operators."""
    with contextlib.ExitStack() as stack:
        for shards in {id(t._shards): t._shards for t in tables if hasattr(t, "_shards")}.values():
            stack.enter_context(shards.all())
        yield
