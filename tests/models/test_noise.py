"""Noise of a list of prompts does not depend on how the list is cut into batches."""

import numpy as np
import pytest
import torch

from grade.models.noise import NoiseBlocks
from grade.training.evaluate import evaluate
from grade.training.toy import toy_task

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


def test_a_mean_does_not_depend_on_the_batch_size():
    task = toy_task(dtype="float64")
    texts = task.validation_prompts[:32]
    results = [
        evaluate(task.backbone, texts, task.reward_model, max_new_tokens=6, max_prompt_tokens=6, batch_size=size)
        for size in (32, 1, 5, 64)
    ]
    for other in results[1:]:
        assert other.completions == results[0].completions
        # Sums of a batch's products run in another order: float64 rounds them by 1e-16 of their size.
        np.testing.assert_allclose(other.reward, results[0].reward, rtol=1e-9)
