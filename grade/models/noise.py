"""Gumbel and exponential noise, float32 whatever the model's type."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Draw = Callable[[tuple[int, ...]], Tensor]
"""Gives new noise of a shape at every call."""


class RowGenerator(torch.Generator):
    """A generator for consecutive rows of a batch: `draw_rows` draws for the whole batch, and takes these.

    So a row's noise depends on the seed and its number in the batch, and not on how the batch is cut into parts. The
    other rows' noise is the price.
    """

    def __new__(cls, device: torch.device, seed: int, first: int, batch: int) -> RowGenerator:
        """For the rows from number ``first`` on of a batch of so many."""
        generator = super().__new__(cls, device=device)
        generator.manual_seed(seed)
        generator.first, generator.batch = first, batch
        return generator


def draw_rows(
    shape: tuple[int, ...], generator: torch.Generator, draw: Callable[[tuple[int, ...]], Tensor]
) -> Tensor:  # fmt: skip
    """What ``draw`` makes of a shape [n, ...]; with a `RowGenerator` of its batch's, whose n rows are taken."""
    if not isinstance(generator, RowGenerator):
        return draw(shape)
    return draw((generator.batch, *shape[1:]))[generator.first : generator.first + shape[0]]


def gumbel_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """Standard Gumbel noise ``-log(Exp(1))`` in float32: mean 0.5772 (Euler's constant), variance pi^2 / 6.

    The device is the generator's own, which is the default, or meta: noise without data.
    """
    return exponential_noise(shape, generator, device or generator.device).log_().neg_()


def exponential_noise(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Standard exponential noise in float32, at least the smallest normal number, so that its logarithm is finite."""

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device).exponential_(generator=generator)

    return draw_rows(shape, generator, draw).clamp_min_(torch.finfo(torch.float32).tiny)


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
