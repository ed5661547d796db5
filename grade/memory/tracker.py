"""Live bytes of tensor storages, counted at the dispatcher: the same on a CPU, on a GPU and on fake tensors.

`MemoryTracker` sees every operator, counts each new storage once however many views it has, and drops it the moment
its last reference dies: a Python name, a view, a list, a closure, or autograd's saved tensors. It reads sizes only,
never data, so it also runs inside ``FakeTensorMode``.

Left out, because the dispatcher does not show it: scratch memory inside one kernel, the caching allocator's
fragmentation, the CUDA context, tensors made by extensions that bypass the dispatcher, and a storage resized directly
(``tensor.untyped_storage().resize_(n)``) until an operator next returns it. Resizing through an operator
(``tensor.resize_``) is counted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# Stands for the size of a storage that is older than the tracker and not counted.
_OLDER = -1
# torch.tensor(data) creates its storage unseen, so it first appears as the *input* of one of these.
_INTRODUCES_ITS_INPUT = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
ORDINARY = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors whose views no other mode has to make."""


class DispatchMode(TorchDispatchMode):
    """A mode without what torch wraps around it, which takes a tenth of a trace: nothing is compiled here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class MemoryTracker(DispatchMode):
    """Counts live storage bytes while it is active.

    Storages that existed before are not counted, not even when an operator views or writes them, unless they were
    named with `track_existing`. After leaving the context nothing new is counted, but what was counted still goes
    down when it is freed.

    Args:
        round_to: Each storage is rounded up to a multiple of this many bytes. 512 is what CUDA's caching allocator
            does (``kMinBlockSize`` in ``CUDACachingAllocator.cpp``); 1 gives exact counts.

    Attributes:
        current: Live bytes now.
        peak: The highest `current` since the start.

    >>> with MemoryTracker(round_to=1) as tracker:
    ...     x = torch.ones(100)     # 400 bytes of float32
    ...     y = x.view(10, 10).T    # views: nothing new
    ...     z = (x * 2) + 1         # the product is freed as soon as the sum exists
    >>> tracker.current, tracker.peak
    (800, 1200)
    """

    def __init__(self, round_to: int = 512) -> None:
        super().__init__()
        if round_to < 1:
            raise ValueError(f"round_to must be at least 1, not {round_to}")
        self.round_to = round_to
        self.current = self.peak = 0
        # StorageImpl address -> (weak reference, counted bytes). An entry goes when its storage dies, before the
        # address can be used again. Storages that are not to be counted have _OLDER for their bytes.
        self._live: dict[int, tuple[weakref.ref, int]] = {}

    def track_existing(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count storages that existed before the tracker was entered (weights, optimizer state, inputs), each once."""
        for tensor in tensors:
            storage = storage_of(tensor)
            known = None if storage is None else self._live.get(storage._cdata)
            if known is not None and known[1] == _OLDER:
                del self._live[storage._cdata]
            self._count(tensor)

    def __torch_dispatch__(  # noqa: D105 - the hook of TorchDispatchMode
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = facts(func)
        if known.views:  # half of all calls, and nothing new
            if type(args[0]) not in ORDINARY:
                return func(*args, **kwargs)
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        note_input = self._count if known.introduces else self._ignore
        for tensor in tensors_in(args):
            note_input(tensor)
        if kwargs:
            for tensor in tensors_in(kwargs.values()):
                note_input(tensor)
        result = func(*args, **kwargs)
        for tensor in tensors_in((result,)):
            self._count(tensor)
        return result

    def _ignore(self, tensor: torch.Tensor) -> None:
        """Remember a storage first seen as an input: it is older than the tracker, so its views are not new bytes."""
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in self._live:
            self._live[storage._cdata] = (weakref.ref(storage, self._forget(storage._cdata)), _OLDER)

    def _count(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None:
            return
        key, size = storage._cdata, math.ceil(storage.nbytes() / self.round_to) * self.round_to
        known = self._live.get(key)
        if known is None:
            self._live[key] = (weakref.ref(storage, self._forget(key)), size)
            self._update(size)
            self._made(tensor, size)
        elif known[1] not in (_OLDER, size):  # resized by this operator
            self._live[key] = (known[0], size)
            self._update(size - known[1])

    def _forget(self, key: int) -> Callable[[weakref.ref], None]:
        # Holding the tracker weakly keeps the weights' callbacks from keeping a finished tracker alive.
        tracker = weakref.ref(self)

        def callback(_: weakref.ref) -> None:
            alive = tracker()
            if alive is not None:
                alive._freed(key)
                alive._update(-max(alive._live.pop(key)[1], 0))

        return callback

    def _made(self, tensor: torch.Tensor, size: int) -> None:
        """What a subclass notes of a new storage."""

    def _freed(self, key: int) -> None:
        """What a subclass notes of a storage that dies."""

    def _update(self, change: int) -> None:
        self.current += change
        self.peak = max(self.peak, self.current)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among an operator's values. They nest in lists only; a general tree walk would double the cost."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage, or None for tensors without one (sparse layouts)."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


class _Facts(NamedTuple):
    """What does not depend on the call of an operator."""

    func: OpOverload  # held, so that no other has its id
    name: str
    writes: bool  # to an argument
    views: bool  # returns views of its first argument, and does no more
    introduces: bool  # its input, a storage that was made unseen
    operations: Callable[..., int] | None  # torch's formula


_FACTS: dict[int, _Facts] = {}  # by id: hashing an operator runs code in Python


def facts(func: OpOverload) -> _Facts:
    """What is known of an operator."""
    found = _FACTS.get(id(func))
    if found is None:
        arguments, returned = func._schema.arguments, func._schema.returns
        writes = any(value.alias_info and value.alias_info.is_write for value in arguments)
        introduces = func in _INTRODUCES_ITS_INPUT
        views = bool(returned) and all(value.alias_info for value in returned) and not writes and not introduces
        # What torch composes of other operators, such as ``reshape``, may copy. In inference mode it comes as it is.
        views = views and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        packet = func.overloadpacket
        found = _Facts(func, packet.__name__, writes, views, introduces, flop_registry.get(packet))
        _FACTS[id(func)] = found
    return found
