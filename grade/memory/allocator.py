"""A model of CUDA's caching allocator: what a process reserves for the bytes that are alive.

torch asks the driver for segments, cuts them into blocks and keeps what is freed for later. So a process needs the
segments, not the live bytes. The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` with its default settings:

- a size is rounded up to 512 bytes; up to 1 MiB it is served by the small pool, otherwise by the large one;
- the smallest free block of the pool that is large enough is taken, among equals the one at the lowest address;
- if there is none, a new segment: 2 MiB for the small pool; 20 MiB for less than 10 MiB; else the size, rounded up to
  2 MiB;
- a block is split if at least 512 bytes (small pool) or more than 1 MiB (large pool) remain;
- a freed block merges with its free neighbours in the segment;
- a segment is kept.

Left out: a full device, which returns unused segments; other streams (each has blocks of its own, and those of a
collective are freed when its stream is done); ``expandable_segments`` and the other settings of
``PYTORCH_CUDA_ALLOC_CONF``; garbage collection; the driver's own granularity.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from grade.memory.models import model_config
from grade.memory.records import StorageRecord
from grade.memory.settings import Sharding, TracedConfig
from grade.memory.trace import few_passes, trace_layers

# Names of c10/core/AllocatorConfig.h
MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = 2**20  # kSmallSize
SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer
MIN_LARGE = 10 * 2**20  # kMinLargeAlloc
ROUND_LARGE = 2 * 2**20  # kRoundLarge

CONTEXT = 426 * 2**20
"""What the driver takes for a process before its first tensor: context and kernels that are loaded when first used.

``nvidia-smi`` showed 426 MiB for torch 2.10 with CUDA 13.0 on an RTX 6000 Ada (unslothai/unsloth-zoo, pull request
1053); torch's maintainers say about 400 MB (pytorch/pytorch, issue 109888). It differs from card to card, and grows
with each kernel that is loaded."""

BEYOND_TRACE = CONTEXT + 179 * 2**20
"""What a card holds beyond a trace: the context, and at most 179 MiB of workspaces and unused parts of blocks, as the
allocator of an H100 did in ten steps of Qwen3-4B (``docs/memory.md``, On a GPU)."""

WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""cuBLAS' workspace, 8.1 MiB, which torch takes from the allocator at the first product (``parseChosenWorkspaceSize``
in ``aten/src/ATen/cuda/CublasHandlePool.cpp``)."""
WORKSPACE_HOPPER = 4096 * 8 * 1024
"""The same on compute capability 9.0: 32 MiB."""

NCCL_CHANNELS = 32
COMMUNICATION = NCCL_CHANNELS * 4 * 2**20
"""NCCL's buffers for one communicator: 4 MiB (the default of ``NCCL_BUFFSIZE``) for each of at most `NCCL_CHANNELS`
channels (``NCCL_MAX_CTAS``; https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). They lie outside the
allocator. NCCL may choose fewer channels, and takes more buffers where it also uses trees."""


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment."""

    address: int  # segments lie in the order in which they were made
    size: int
    small: bool  # whether it belongs to the small pool
    used: bool = False
    before: _Block | None = None  # its neighbour below in the segment
    after: _Block | None = None


_order = attrgetter("size", "address")


class CachingAllocator:
    """The allocator of one device and one stream.

    ``allocated`` are bytes of blocks in use, ``reserved`` those of segments, as ``torch.cuda`` counts them.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(1000)
    >>> block.size, allocator.reserved
    (1024, 2097152)
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = 0
        self._free: dict[bool, list[_Block]] = {True: [], False: []}  # by pool, in `_order`

    def allocate(self, nbytes: int) -> _Block:
        """A block for that many bytes, to be given to `free`."""
        size = -(-nbytes // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL_SIZE
        place = bisect_left(self._free[small], (size, 0), key=_order)
        block = self._free[small].pop(place) if place < len(self._free[small]) else self._new_segment(size, small)
        rest = block.size - size
        if rest >= MIN_BLOCK if small else rest > SMALL_SIZE:
            remaining = _Block(block.address + size, rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = remaining
            block.after, block.size = remaining, size
            insort(self._free[small], remaining, key=_order)
        block.used = True
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: _Block) -> None:
        """Give a block back; it merges with free neighbours."""
        free = self._free[block.small]
        block.used = False
        self.allocated -= block.size
        for low, high in ((block, block.after), (block.before, block)):
            if low is None or high is None or low.used or high.used:
                continue
            neighbour = high if low is block else low
            del free[bisect_left(free, _order(neighbour), key=_order)]
            low.size, low.after = low.size + high.size, high.after
            if low.after is not None:
                low.after.before = low
            block = low
        insort(free, block, key=_order)

    def _new_segment(self, size: int, small: bool) -> _Block:
        if small:
            segment = SMALL_SEGMENT
        else:
            segment = LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += segment
        return _Block(self.reserved - segment, segment, small)


@dataclass(frozen=True)
class Reserved:
    """What the allocator makes of a step: peaks in bytes."""

    live: int  # each storage rounded up to 512 bytes
    allocated: int  # blocks in use: also what they have over the size asked for
    reserved: int  # segments: what a process holds, beside its context

    @property
    def fragmentation(self) -> float:
        """The part of the reserved peak that is beyond the live one, 0 to 1."""
        return 1 - self.live / self.reserved if self.reserved else 0.0


def allocate_step(records: Iterable[StorageRecord], workspace: int = 0) -> Reserved:
    """Run a step's allocations and frees (all layers, in order of allocation) through the allocator.

    Storages that existed before come first and stay, then ``workspace`` bytes. The step is repeated on the cache that
    the one before has left, as in training: a cache of another history can make the second step reserve more.
    """
    allocator, records = CachingAllocator(), list(records)
    stays = {r.birth: r.op == "existing" and (r.death is None or r.death >= len(records)) for r in records}
    fixed = [r.nbytes for r in records if stays[r.birth]] + [workspace]
    for nbytes in filter(None, fixed):
        allocator.allocate(nbytes)  # never freed: their blocks need no name
    made = [r for r in records if not stays[r.birth] and r.nbytes]
    peak = max(_run(allocator, made), _run(allocator, made))
    return Reserved(sum(fixed) + peak, allocator.peak_allocated, allocator.reserved)


def _run(allocator: CachingAllocator, records: list[StorageRecord]) -> int:
    """One step; its highest live bytes. What is alive at its end is freed there: the next step makes it again."""
    ends = sorted((r for r in records if r.death is not None), key=lambda r: r.death, reverse=True)
    blocks: dict[int, _Block] = {}
    live = peak = 0
    for record in records:
        while ends and ends[-1].death <= record.birth:
            old = ends.pop()
            allocator.free(blocks.pop(old.birth))
            live -= old.nbytes
        blocks[record.birth] = allocator.allocate(record.nbytes)
        live += record.nbytes
        peak = max(peak, live)
    for block in blocks.values():
        allocator.free(block)
    return peak


def reserved_by(
    config: TracedConfig, processes: int = 1, sharding: Sharding = "fsdp2", workspace: int = WORKSPACE
) -> Reserved:
    """The allocator's peaks of a step; arguments as of `grade.memory.trace.trace`.

    Reserved bytes are not linear in layers, so every layer is traced. Of the passes that sample, only the first and the
    last ones run, and the key-value cache grows token by token between them (`grade.memory.trace.few_passes`).
    """
    with few_passes(config.max_new_tokens, growing=True):
        tracker = trace_layers(config, model_config(config.model), "cuda", processes, sharding)
    return allocate_step(tracker.records, workspace=workspace)
