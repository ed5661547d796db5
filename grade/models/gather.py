"""Tables of which each process may hold some rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor


@contextlib.contextmanager
def whole(*tables: Tensor) -> Iterator[None]:
    """Within this context all rows are here of those tables that are in parts: gathered once for many operators."""
    with contextlib.ExitStack() as stack:
        for parts in {id(t.parts): t.parts for t in tables if hasattr(t, "parts")}.values():
            stack.enter_context(parts.all())
        yield
