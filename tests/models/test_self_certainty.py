"""Self-certainty against its definition, hand arithmetic and gradcheck; the document's formula against both."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.errors import InputError
from grade.experiments.intuitor.measure.study import chunked_over_vocabulary
from grade.experiments.traced import saved_bytes
from grade.models.head import CHUNK_ROWS, Head, certainty_of_logits, self_certainty
from grade.models.scoring import completion_certainty


def a_head(vocab=50, dim=6, softcap=None, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, dim, generator=generator, dtype=dtype)
    return Head(weight, torch.randn(vocab, generator=generator, dtype=dtype), 0.5, softcap)


def a_hidden(n=CHUNK_ROWS + 3, dim=6, dtype=torch.float64):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_it_is_the_divergence_from_uniform(temperature):
    head, hidden = a_head(), a_hidden()
    logp = (head(hidden) / temperature).log_softmax(-1)
    uniform = torch.full_like(logp, 1 / 50)
    want = F.kl_div(logp, uniform, reduction="none").sum(-1)
    assert torch.allclose(self_certainty(head, hidden, temperature), want, atol=1e-13, rtol=0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_its_gradient_is_exact(softcap, temperature):
    hidden = a_hidden(3).requires_grad_()
    assert torch.autograd.gradcheck(lambda h: self_certainty(a_head(softcap=softcap), h, temperature), hidden)


def test_by_hand():
    # p = (1/2, 1/4, 1/4): KL(U || p) = log(1/3) - mean(log p) = -1.0986 + (0.6931 + 2 * 1.3863) / 3
    logits = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()
    want = -math.log(3) + (math.log(2) + 2 * math.log(4)) / 3
    assert float(certainty_of_logits(logits)) == pytest.approx(want, abs=1e-15)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=30), st.floats(-5, 5))
@settings(max_examples=50, deadline=None)
def test_it_is_never_negative_and_does_not_see_a_shift(values, shift):
    logits = torch.tensor(values, dtype=torch.float64)
    assert float(certainty_of_logits(logits)) >= -1e-12
    assert torch.allclose(certainty_of_logits(logits + shift), certainty_of_logits(logits), atol=1e-12)


def test_backward_keeps_what_does_not_depend_on_the_vocabulary():
    kept = []
    for vocab in (100, 1000):
        head = a_head(vocab, dtype=torch.float32)
        hidden = a_hidden(dtype=torch.float32).requires_grad_()
        kept.append(saved_bytes(lambda head=head, hidden=hidden: self_certainty(head, hidden), exclude=[hidden]))
    assert kept == [hidden.numel() * 4] * 2
    with torch.no_grad():
        assert saved_bytes(lambda: self_certainty(head, hidden)) == 0


def test_chunking_the_vocabulary_is_another_quantity_and_blind_to_confidence():
    logits = 2 * torch.randn(4096, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right, wrong = [], []
    for peak in (10.0, 20.0, 30.0):
        logits[7] = peak
        right.append(float(certainty_of_logits(logits)) + math.log(4096))  # the published form, without log V
        wrong.append(float(chunked_over_vocabulary(logits, 64)))
    assert right[2] - right[0] > 19  # a token 20 nats likelier shows in full
    assert wrong[2] - wrong[0] == pytest.approx(20 / 64, rel=0.05)  # one chunk of 64
    assert all(r - w > math.log(64) for r, w in zip(right, wrong, strict=True))  # Jensen


def test_a_completion_scores_its_own_tokens():
    values = torch.tensor([[1.0, 3.0, 100.0], [2.0, 100.0, 100.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert completion_certainty(values, mask).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match="at least one token"):
        completion_certainty(values, torch.zeros_like(mask))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(InputError, match="temperature"):
        self_certainty(a_head(), a_hidden(2), temperature)
