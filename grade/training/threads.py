"""As many threads as are fastest for a model's size."""

from __future__ import annotations

import os

import torch

SMALLEST_WIDTH = 1024
"""Hidden size from which a product of a step is large enough to share: below, threads wait for each other. SmolLM2
(576) trains no faster on two cores than on one, and three times slower where two processes share them."""


def use_fastest_threads(hidden_size: int) -> int:
    """Set torch's threads for a model on the CPU, unless ``OMP_NUM_THREADS`` says how many.

    Args:
        hidden_size: The model's D.

    Returns:
        The number of threads.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if hidden_size < SMALLEST_WIDTH else os.cpu_count() or 1)
    return torch.get_num_threads()
