"""Gumbel and exponential noise, float32 whatever the model's type."""

from __future__ import annotations

import torch
from torch import Tensor


def gumbel_noise(
    shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """Standard Gumbel noise ``-log(Exp(1))`` in float32.

    Args:
        shape: Shape of the noise.
        generator: Seeded generator; the same seed gives the same noise.
        device: The generator's own, which is the default, or meta: noise without data.

    Returns:
        Noise with mean 0.5772 (Euler's constant) and variance pi^2 / 6.
    """
    return exponential_noise(shape, generator, device or generator.device).log_().neg_()


def exponential_noise(shape: tuple[int, ...], generator: torch.Generator, device: torch.device | str) -> Tensor:
    """Standard exponential noise in float32, at least the smallest normal number, so that its logarithm is finite."""
    empty = torch.empty(shape, dtype=torch.float32, device=device)
    return empty.exponential_(generator=generator).clamp_min_(torch.finfo(torch.float32).tiny)
