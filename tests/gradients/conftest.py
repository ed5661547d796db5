"""A policy for the tests of gradients."""

import pytest
from conftest import make_backbone, tiny_gpt2


@pytest.fixture(scope="module")
def policy():
    """A GPT-2, whose layer norms are float64 in a float64 model."""
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])
