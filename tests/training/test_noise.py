"""Noise of a list of prompts does not depend on how the list is cut into batches."""

import pytest
import torch

from grade.training.evaluate import NoiseBlocks

N, V, T, BLOCK = 22, 5, 3, 8


def drawn(batch_size, ended_after=T):
    """Noise [N, ended_after, V], taken batch by batch."""
    noise = NoiseBlocks(torch.Generator().manual_seed(3), N, V, T, BLOCK)
    parts = []
    for start in range(0, N, batch_size):
        stop = min(start + batch_size, N)
        draw = noise.rows(start, stop)
        parts.append(torch.stack([draw((stop - start, V)) for _ in range(ended_after)], 1))
    return torch.cat(parts)


@pytest.mark.parametrize("batch_size", [1, 3, 5, 8, 12, 16, 22, 64])
def test_any_batches_give_the_same_noise_also_where_all_texts_ended_early(batch_size):
    for tokens in (1, T):
        assert torch.equal(drawn(batch_size, tokens), drawn(BLOCK)[:, :tokens])
