"""Random numbers of a batch: uniform ones that sample tokens, and Gumbel noise, float32 whatever the model's type."""

from __future__ import annotations

from collections.abc import Callable

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


def draw_rows(shape: tuple[int, ...], generator: torch.Generator, draw: Draw) -> Tensor:
    """What ``draw`` makes of a shape [n, ...]; with a `RowGenerator` of its batch's, whose n rows are taken."""
    if not isinstance(generator, RowGenerator) or generator.batch == shape[0]:
        return draw(shape)
    # A copy: a view would keep the other rows' noise as long as these are kept.
    return draw((generator.batch, *shape[1:]))[generator.first : generator.first + shape[0]].clone()


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform numbers in [0, 1), in float64 on the generator's device."""

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=generator.device).uniform_(generator=generator)

    return draw_rows(shape, generator, draw)


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
