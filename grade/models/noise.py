"""Gumbel and exponential noise, float32 whatever the model's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Draw = Callable[[tuple[int, ...]], Tensor]
"""Gives new noise of a shape at every call."""


def gumbel_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """Standard Gumbel noise ``-log(Exp(1))`` in float32: mean 0.5772 (Euler's constant), variance pi^2 / 6.

    The device is the generator's own, which is the default, or meta: noise without data.
    """
    return exponential_noise(shape, generator, device or generator.device).log_().neg_()


def exponential_noise(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Standard exponential noise in float32, at least the smallest normal number, so that its logarithm is finite."""
    empty = torch.empty(shape, dtype=torch.float32, device=device)
    return empty.exponential_(generator=generator).clamp_min_(torch.finfo(torch.float32).tiny)


class NoiseBlocks:
    """Gumbel noise of a list of prompts, T draws per prompt, which depends on a prompt's place in the list alone.

    One generator, not used elsewhere, goes through the list in blocks of ``size`` consecutive prompts. It draws a
    block's noise as a whole, once for each of T = ``draws`` tokens, then that of the next block. Prompts that are
    sampled together take their rows of it, whatever part of a block or of several blocks they are.
    """

    def __init__(self, generator: torch.Generator, prompts: int, vocab_size: int, draws: int, size: int) -> None:
        self._device, self._starts = generator.device, [generator.get_state()]
        self._prompts, self._vocab_size, self._draws, self._size = prompts, vocab_size, draws, size
        self._open: dict[int, Iterator[Tensor]] = {}  # blocks that are being read

    def rows(self, start: int, stop: int) -> Draw:
        """Noise [stop - start, V] of the prompts at these places, for one token after the other from the first on."""
        first, last = start // self._size, (stop - 1) // self._size
        while len(self._starts) <= last:  # a block begins where the one before it ends
            block = len(self._starts) - 1
            for _ in self._open.pop(block, self._block(block)):
                pass
        blocks = {block: self._block(block) for block in range(first, last + 1)}
        self._open |= blocks

        def draw(shape: tuple[int, ...]) -> Tensor:
            noise = torch.cat([next(block) for block in blocks.values()])
            noise = noise[start - first * self._size : stop - first * self._size]
            if noise.shape != shape:
                raise ValueError(f"noise of shape {tuple(noise.shape)} for logits of shape {shape}")
            return noise

        return draw

    def _block(self, block: int) -> Iterator[Tensor]:
        """Noise of a block, token by token."""
        generator = torch.Generator(self._device)
        generator.set_state(self._starts[block])
        length = min(self._size, self._prompts - block * self._size)
        for _ in range(self._draws):
            yield gumbel_noise((length, self._vocab_size), generator)
        if len(self._starts) == block + 1:
            self._starts.append(generator.get_state())
