"""Chunks of logits: as large as a bound allows, and a lean step of a large model that is lean."""

import pytest

from grade.experiments.scale.measure.fits import lean_table
from grade.models.head import CHUNK_ELEMENTS, CHUNK_ROWS, MANY, chunk_rows


@pytest.mark.parametrize(
    ("vocab", "count", "rows"),
    [
        (512, 64, 64),
        (49_152, 1, 64),  # SmolLM2
        (65_536, 64, 64),  # 2^16 times 64 is the bound
        (65_537, 64, 32),
        (131_072, 64, 32),
        (151_936, 64, 16),  # Qwen3
        (151_936, 255, 16),
        (151_936, 256, 32),  # 8 chunks
        (151_936, 512, 64),
        (2**23, 7, 1),
        (2**23, 8, 1),
        (2**23, 16, 2),
    ],
)
def test_a_chunk_is_small_where_rows_are_few_and_the_vocabulary_is_large(vocab, count, rows):
    assert chunk_rows(vocab, count) == rows <= CHUNK_ROWS
    assert rows in (1, CHUNK_ROWS) or rows * vocab <= CHUNK_ELEMENTS or count >= MANY * rows


def test_the_lean_step_of_qwen3_4b_needs_a_fifth_of_a_gib_over_its_weights():
    table = lean_table("qwen3-4b", batch=2, tokens=32).set_index("phase")
    assert table.over_weights_gib["step"] == table.over_weights_gib.max() <= 0.2
    assert table.weights_bytes["step"] == table.weights_bytes["rollout"]
    # Parameters of 2 bytes in blocks of 512, and the rotary table.
    assert 8_044_936_192 <= table.weights_bytes["step"] <= 8_044_936_192 * 1.0001
