"""Gumbel and exponential noise, float32 whatever the model's type."""

from __future__ import annotations

from collections.abc import Callable

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
        self._device, self._vocab_size, self._draws, self._size = generator.device, vocab_size, draws, size
        self._lengths = [min(size, prompts - start) for start in range(0, prompts, size)]
        self._states = [generator.get_state()]  # at the beginning of the first blocks
        self._used: dict[int, tuple[torch.Generator, int]] = {}  # generators within blocks, and how often they drew

    def rows(self, start: int, stop: int) -> Draw:
        """Noise [stop - start, V] of the prompts at these places, for one token after the other from the first on."""
        blocks = range(start // self._size, (stop - 1) // self._size + 1)
        generators = [self._at(block) for block in blocks]  # finding a block's beginning uses up the earlier ones
        self._used |= {block: (generator, 0) for block, generator in zip(blocks, generators, strict=True)}

        def draw(shape: tuple[int, ...]) -> Tensor:
            first = blocks[0] * self._size
            noise = torch.cat([self._draw(block) for block in blocks])[start - first : stop - first]
            if noise.shape != shape:
                raise ValueError(f"noise of shape {tuple(noise.shape)} for logits of shape {shape}")
            return noise

        return draw

    def _draw(self, block: int) -> Tensor:
        generator, drawn = self._used[block]
        self._used[block] = (generator, drawn + 1)
        return gumbel_noise((self._lengths[block], self._vocab_size), generator)

    def _at(self, block: int) -> torch.Generator:
        while len(self._states) <= block:
            last = len(self._states) - 1
            if last not in self._used:
                self._used[last] = (self._at(last), 0)
            while self._used[last][1] < self._draws:
                self._draw(last)
            self._states.append(self._used.pop(last)[0].get_state())
        generator = torch.Generator(self._device)
        generator.set_state(self._states[block])
        return generator
