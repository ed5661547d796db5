"""Text to measure on."""

import pytest

from grade.errors import InputError
from grade.experiments.setting import load_policy, text_sequences


def test_text_that_is_too_short_is_refused():
    with pytest.raises(InputError, match="tokens"):
        text_sequences(load_policy("", "", "")[0], ["short"], 1, 4, 6)
