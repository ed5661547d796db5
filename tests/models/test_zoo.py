"""Every causal architecture of transformers is exact or refused, and the page says which."""

import os
import re

import pytest
from models.zoo import BOUND, IN_FLOAT32, LEFT_OUT, PAGE, examine, kinds

REFUSED = {
    "ctrl", "falcon_mamba", "gemma3n_text", "gemma4_text", "llama4_text", "mamba", "mamba2", "moshi", "nemotron_h",
    "recurrent_gemma", "rwkv", "zamba2",
}  # fmt: skip
CASES = kinds() if os.environ.get("GRADE_ALL_CASES") == "1" else sorted({*kinds()[::6], *REFUSED, *IN_FLOAT32})


def listed(title):
    """The architectures of one paragraph of the page."""
    (line,) = re.findall(rf"\*\*{title}\*\*.*?: (.*?)\.$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return line.replace(",", " ").split()


@pytest.mark.parametrize("kind", CASES)
def test_an_architecture_is_exact_or_refused_as_the_page_says(kind):
    error = examine(kind)
    assert kind in listed("Refused" if error is None else "Accepted"), "python tests/models/zoo.py --write"
    if error is not None:
        assert kind not in REFUSED and error <= (1e-5 if kind in IN_FLOAT32 else BOUND)


def test_the_page_lists_every_architecture():
    assert sorted(listed("Accepted") + listed("Refused")) == kinds() and listed("Not tried") == list(LEFT_OUT)
