"""Tracing the sampling of a long completion in the time of a short one.

Most of a trace is the sampling loop: every token runs every traced layer. From token to token a pass allocates the
same, with one more position in the key-value cache. So no pass needs more than the last one, and those between need
not run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from grade.memory.kernels import Device
from grade.memory.live import LiveTracker
from grade.memory.sharded import Sharding
from grade.memory.step import TracedConfig
from grade.memory.trace import Trace, trace
from grade.models.sampling import Decoder

AT_EACH_END = 2
"""Passes that run first and last: in the second one the cache of the first is replaced by a longer one."""

_advance = Decoder.advance


@contextlib.contextmanager
def few_passes(new_tokens: int, growing: bool = False) -> Iterator[None]:
    """Within this context a decoder runs the model for the first two and the last two tokens that it is fed.

    For those between, nothing of the pass is allocated but the key-value cache. The rest of the sampling loop runs for
    every token: logits, noise, the support, the lists that hold them. Peaks are those of a full trace, as no pass needs
    more than the last. So are operations and bytes received: a pass takes the same number more than the one before it,
    and their sum follows from the second and the last but one. Live bytes over the step have fewer points. Caches with
    a sliding window decode every token.

    Args:
        new_tokens: T, of every decoder that is made in this context.
        growing: Let the cache grow token by token, as an allocator sees it; otherwise at once.
    """
    passes = new_tokens - 1  # the last token is not fed
    last_ones = passes - AT_EACH_END + 1
    skipped = last_ones - AT_EACH_END - 1

    def advance(self: Decoder, embeds: Tensor) -> None:
        number = self.passes = getattr(self, "passes", 0) + 1
        watcher = self.backbone._watcher
        if skipped < 1 or watcher is None or any(type(layer) is not DynamicLayer for layer in self.cache.layers):
            _advance(self, embeds)
        elif AT_EACH_END < number < last_ones:
            if growing or number == last_ones - 1:
                _grow(self, 1 if growing else skipped)
        else:
            before = _counts(watcher)
            _advance(self, embeds)
            cost = [now - then for now, then in zip(_counts(watcher), before, strict=True)]
            if number == AT_EACH_END:
                self.cost = cost
            elif number == last_ones:
                flops, received = (skipped * (one + other) // 2 for one, other in zip(self.cost, cost, strict=True))
                watcher.flops, watcher.received = watcher.flops + flops, watcher.received + received

    with patch.object(Decoder, "advance", advance):
        yield


def quick_trace(
    config: TracedConfig, device: Device = "cuda", processes: int = 1, sharding: Sharding = "fsdp2"
) -> Trace:
    """`grade.memory.trace.trace` of a few layers and a few of the passes that sample: the same peaks, sooner.

    Args:
        config: The step.
        device: As in `trace`.
        processes: As there.
        sharding: As there.

    Returns:
        The trace.

    Raises:
        InputError: As `trace`.
    """
    with few_passes(config.max_new_tokens):
        return trace(config, device=device, processes=processes, sharding=sharding)


def _counts(tracker: LiveTracker) -> tuple[int, int]:
    return tracker.flops, tracker.received


def _grow(decoder: Decoder, positions: int) -> None:
    """More positions in the mask and in the cache."""
    decoder.mask = torch.cat([decoder.mask, decoder.mask.new_ones(len(decoder.mask), positions)], 1)
    for layer in decoder.cache.layers:
        for name in ("keys", "values"):
            old = getattr(layer, name)
            setattr(layer, name, torch.cat([old, old[:, :, -1:].expand(-1, -1, positions, -1)], 2))
            decoder.backbone._watcher.tag([getattr(layer, name)], "kv cache")
