"""Parameter counts against published ones."""

import pytest

from grade.experiments.formulas import parameter_count
from grade.memory.shapes import QWEN3_4B, QWEN25_1_5B, QWEN25_3B, QWEN25_7B, SMOLLM2_135M


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (SMOLLM2_135M, 134_515_008),
        (QWEN3_4B, 4_022_468_096),
        (QWEN25_1_5B, 1_543_714_304),
        (QWEN25_3B, 3_085_938_688),
        (QWEN25_7B, 7_615_616_512),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameter_count_is_exact(shape, expected):
    assert parameter_count(shape) == expected
