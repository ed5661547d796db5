"""Every causal architecture of transformers is exact or refused with a reason, and the page says which."""

import pytest
from models.zoo import BOUND, IN_FLOAT32, LEFT_OUT, PAGE, kinds, page, rows
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

REFUSED = {
    "ctrl": "inputs_embeds as they are",  # multiplied in place
    "falcon_mamba": "key-value cache",
    "gemma3n_text": "embeddings per layer",
    "gemma4_text": "embeddings per layer",
    "llama4_text": "runs on embeddings",
    "mamba": "key-value cache",
    "mamba2": "key-value cache",
    "moshi": "decodes on its cache",
    "nemotron_h": "time steps",
    "recurrent_gemma": "head(last hidden state)",  # a soft cap that is not read
    "rwkv": "key-value cache",
    "zamba2": "time steps",
}


@pytest.mark.parametrize("kind", kinds())
def test_an_architecture_is_exact_or_refused_with_a_reason(kind):
    row = next(row for row in rows() if row.kind == kind)
    if row.error is None:
        assert row.reason
    else:
        assert row.error <= (1e-5 if kind in IN_FLOAT32 else BOUND)


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_models_that_were_silently_wrong_are_refused(kind, reason):
    row = next(row for row in rows() if row.kind == kind)
    assert row.error is None
    assert reason in row.reason


def test_the_zoo_is_large_and_says_what_it_leaves_out():
    assert len(kinds()) >= 60
    assert sum(row.error is not None for row in rows()) >= 77
    assert set(LEFT_OUT) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "python tests/models/zoo.py --write"
