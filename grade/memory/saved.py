"""Bytes that a computation keeps for its backward pass, counted in two ways.

`saved_bytes` counts what autograd saves. `kept_bytes` counts what is still alive afterwards, including what autograd
does not see: Python lists, caches, and the inputs held by the closures of `torch.utils.checkpoint`.
Neither rounds sizes, so both can be compared with hand arithmetic.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from grade.memory.tracker import MemoryTracker

Result = TypeVar("Result")


def saved_bytes(fn: Callable[[], object], exclude: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the unique storages that autograd packs while ``fn`` runs.

    A storage counts once and whole, however many views of it are saved. What a checkpointed region would save is not
    packed here (see `kept_bytes`); if ``fn`` itself runs backward, what is packed in a recomputation does count.

    Args:
        fn: Runs the computation. Its result is dropped.
        exclude: Tensors whose storages do not count: parameters, inputs.

    Returns:
        Bytes.

    >>> x, w = torch.ones(8, 16), torch.ones(16, 4, requires_grad=True)
    >>> saved_bytes(lambda: (x @ w).exp())                  # x: 8*16*4 = 512, the result of exp: 8*4*4 = 128
    640
    >>> saved_bytes(lambda: (x @ w).exp(), exclude=[x])
    128
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
    # Hold the storages until the end: a freed address could be used again for another storage.
    packed: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            packed[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in packed.values())


def kept_bytes(fn: Callable[[], Result], round_to: int = 1) -> tuple[Result, int]:
    """Bytes of the storages that ``fn`` creates and that are alive when it has returned, its result among them.

    Garbage in reference cycles is collected first, so it does not count.

    Args:
        fn: Runs the computation and returns what to hold: usually the loss, and through it the graph.
        round_to: As in `MemoryTracker`.

    Returns:
        The result of ``fn`` and the bytes.

    >>> w = torch.ones(16, 4, requires_grad=True)
    >>> loss, kept = kept_bytes(lambda: (torch.ones(8, 16) @ w).exp().sum())
    >>> kept                                                # 512 + 128 as above, and the loss: 4
    644
    """
    gc.freeze()  # older objects do not count, and searching all of torch's would take most of the time
    try:
        with MemoryTracker(round_to) as tracker:
            result = fn()
        gc.collect()
    finally:
        gc.unfreeze()
    return result, tracker.current
