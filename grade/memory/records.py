"""A record of every storage: when it was alive, what it was for, and what made it.

`LiveTracker` extends `MemoryTracker` by one record per storage and one live-byte count per allocation. A storage's
category is decided when the step is over, because only then is it known whether a tensor outlived its phase (kept for
backward) or not (temporary).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from grade.memory.tracker import ORDINARY, MemoryTracker, facts, storage_of

Category = Literal[
    "weights", "adapter", "gradients", "optimizer", "activations", "logits", "kv cache", "rollout", "temporary",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Uses of memory. ``activations``: alive beyond the phase that made them, or saved by autograd; ``logits``: any tensor
with a vocabulary-sized dimension, whatever its use; ``temporary``: the rest."""

_LAYER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(slots=True)
class StorageRecord:
    """One storage."""

    nbytes: int  # rounded
    shape: tuple[int, ...]  # of the first tensor seen on it
    dtype: torch.dtype
    op: str  # the operator that made it
    module: str  # whose forward made it; empty in backward and in losses
    phase: str  # in which it was made
    birth: int  # index of its allocation
    live: int = 0  # bytes right after it
    death: int | None = None  # number of allocations when it was freed
    end_phase: str = ""  # in which it was freed
    tag: Category | None = None  # the caller's
    saved: bool = False  # by autograd, for backward


def _operations(count: Callable[..., int], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    try:
        return count(*args, **kwargs, out_val=result)
    except AssertionError:  # torch before 2.12: its formulas know no grouped queries, so keys and values are repeated
        heads = max(t.shape[1] for t in args if isinstance(t, torch.Tensor) and t.ndim == 4)
        repeated = [t.new_empty(len(t), heads, *t.shape[2:], device="meta")
                    if isinstance(t, torch.Tensor) and t.ndim == 4 else t for t in args]  # fmt: skip
        return count(*repeated, **kwargs, out_val=result)


class LiveTracker(MemoryTracker):
    """`MemoryTracker` with records; with ``device`` only of tensors on this type of device."""

    def __init__(self, round_to: int = 512, device: str | None = None) -> None:
        super().__init__(round_to)
        self.device = device
        self.records: list[StorageRecord] = []  # every storage that was counted, in order of allocation
        self.flops = 0  # of products, convolutions and attention, by torch's own formulas (2 n k m for a product)
        self._open: dict[int, StorageRecord] = {}
        self._op = "existing"
        self._modules: list[str] = []
        self._stack: list[str] = []

    @property
    def phase(self) -> str:
        """The running phase: ``backward`` inside autograd, else the outermost `during`."""
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return self._stack[0] if self._stack else "forward"

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """A context that names a phase. Of nested phases the outermost counts."""
        self._stack.append(phase)
        try:
            yield
        finally:
            self._stack.pop()

    def tag(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        """Set the category of tensors that have none; storages that are not counted are skipped."""
        for tensor in tensors:
            record = self._record_of(tensor)
            if record is not None and record.tag is None:
                record.tag = category

    def _record_of(self, tensor: torch.Tensor | None) -> StorageRecord | None:
        storage = None if tensor is None else storage_of(tensor)
        return None if storage is None else self._open.get(storage._cdata)

    @contextlib.contextmanager
    def naming(self, root: nn.Module) -> Iterator[None]:
        """Within this context, storages are attributed to the submodules of ``root``, and saved ones are marked."""
        names = {id(module): name for name, module in root.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(names.get(id(module), type(module).__name__))

        def leave(module: nn.Module, *_: Any) -> None:
            self._modules.pop()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            record = self._record_of(tensor)
            if record is not None:
                record.saved = True
            # An output saved by its own node would otherwise hold that node, and never be freed.
            if type(tensor) not in ORDINARY:
                return tensor.detach()
            with torch._C._DisableTorchDispatch():
                return tensor.detach()

        before = nn.modules.module.register_module_forward_pre_hook(enter)
        after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                yield
        finally:
            before.remove()
            after.remove()

    def category(self, record: StorageRecord, vocab: int) -> Category:
        """The category of a storage; see `CATEGORIES`."""
        if record.tag is not None:
            return record.tag
        if any(size >= vocab for size in record.shape):
            return "logits"
        outlived = record.end_phase != record.phase
        if record.phase == "rollout" and not record.saved:
            return "rollout" if outlived else "temporary"
        return "activations" if record.saved or outlived else "temporary"

    def peaks(self) -> dict[tuple, StorageRecord]:
        """The allocation with the highest live bytes of each kind: phase, operator, module without layer, shape."""
        highest: dict[tuple, StorageRecord] = {}
        for record in self.records:
            key = (record.phase, record.op, _LAYER.sub(".*", record.module), record.shape)
            if key not in highest or record.live > highest[key].live:
                highest[key] = record
        return highest

    def alive_at(self, index: int) -> list[StorageRecord]:
        """Records that were alive right after allocation ``index``."""
        return [r for r in self.records if r.birth <= index and (r.death is None or r.death > index)]

    def __torch_dispatch__(  # noqa: D105 - the hook of TorchDispatchMode
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a third of all calls in a trace, and none of them allocates
        known = facts(func)
        outer, self._op = self._op, known.name
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._op = outer
        if known.operations is not None:
            self.flops += _operations(known.operations, args, kwargs or {}, result)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if self.device in (None, tensor.device.type):
            super()._count(tensor)

    def _made(self, tensor: torch.Tensor, size: int) -> None:
        module = self._modules[-1] if self._modules else ""
        record = StorageRecord(
            size, tuple(tensor.shape), tensor.dtype, self._op, module, self.phase, len(self.records), self.current
        )
        self.records.append(record)
        self._open[storage_of(tensor)._cdata] = record

    def _freed(self, key: int) -> None:
        record = self._open.pop(key, None)
        if record is not None:
            record.death, record.end_phase = len(self.records), self.phase
