"""Lean against naive, forward and backward, in float64; and what is kept for backward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.experiments.traced import kept_bytes, saved_bytes
from grade.models import head as vocab
from grade.models.head import (
    Head,
    entropy,
    expected_values,
    kl_divergence,
    self_certainty,
    support_logits,
    token_logps,
    weighted_embedding,
)

N, D, V, K = 9, 5, 130, 4  # V is not a multiple of anything convenient

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.7},
    "soft cap": {"softcap": 2.0, "scale": 1.3, "bias": True},
    "soft cap, sampled at 0.7": {"softcap": 2.0, "temperature": 0.7},
}


def make_head(bias=False, dtype=torch.float64, v=V, d=D, **rest):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(v, d, generator=generator, dtype=torch.float64).to(dtype)
    return Head(weight, torch.randn(v, generator=generator, dtype=torch.float64).to(dtype) if bias else None, **rest)


def hidden(n=N, d=D, seed=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_ROWS", 4)
    monkeypatch.setattr(vocab, "GATHER_ELEMENTS", 3 * K * D)


def same(got, want, x):
    """Values, and their gradients in x along a random vector."""
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weight, retain_graph=True)[0] for y in (got, want)))


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("k", [K, 40, V])  # gathered rows; dense, then gathered; the full vocabulary
def test_support_logits_against_dense(options, k):
    head, h = make_head(**options), hidden()
    support = torch.stack([torch.randperm(V)[:k] if k < V else torch.arange(V) for _ in range(N)])
    same(support_logits(head, h, support), head(h).gather(1, support), h)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_row_functions_against_autograd_on_dense_logits(options):
    head, h, ref, ids = make_head(**options), hidden(), hidden(seed=3), torch.arange(N) * 7
    logp, ref_logp = head(h).log_softmax(-1), head(ref).log_softmax(-1).detach()
    same(kl_divergence(head, h, head, ref), (logp.exp() * (logp - ref_logp)).sum(-1), h)
    same(self_certainty(head, h), -logp.mean(-1) - math.log(V), h)
    same(token_logps(head, h, ids), logp.gather(1, ids[:, None]).squeeze(1), h)
    same(entropy(head, h), -(logp.exp() * logp).sum(-1), h)


@settings(max_examples=25, deadline=None)
@given(offset=st.floats(-1e3, 1e3), noise=st.floats(0, 1e-6))
def test_kl_of_nearly_equal_float32_rows_is_zero(offset, noise):
    """A common offset of all logits and rounding-sized differences must not show: |KL| <= 1e-6 at V = 50,000."""
    v = 50_000
    generator = torch.Generator().manual_seed(0)
    weight = torch.cat([torch.randn(v, 3, generator=generator), torch.full((v, 1), offset)], 1)
    h = torch.cat([torch.randn(2, 3, generator=generator), torch.ones(2, 1)], 1)
    kl = kl_divergence(Head(weight), h, Head(weight), h * (1 + noise))
    assert kl.abs().max() <= 1e-6


def test_rows_and_call_agree_in_bfloat16_inputs_and_give_float32():
    head, h = make_head(dtype=torch.bfloat16), hidden(dtype=torch.bfloat16)
    assert head(h).dtype == torch.float32
    got = support_logits(head, h, torch.arange(K).expand(N, K))
    assert got.dtype == torch.float32
    # Both round one bfloat16 dot product of D terms: at most two units of the last place (2^-7) of the larger.
    torch.testing.assert_close(got, head(h)[:, :K], rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("bias", [False, True])
def test_without_gradient_the_logits_of_a_large_vocabulary_are_the_same(bias):
    head, h = make_head(bias=bias, v=2**14 + 5, dtype=torch.float32), hidden(dtype=torch.float32).view(3, -1, D)
    with torch.no_grad():
        blocks = head(h)
    torch.testing.assert_close(blocks, head(h))


def test_weighted_embedding_against_gather():
    table = torch.randn(V, D, dtype=torch.float64)
    for support in (torch.randint(V, (N, K)), torch.arange(V).expand(N, V)):
        weights = torch.rand(support.shape, dtype=torch.float64, requires_grad=True)
        same(weighted_embedding(table, support, weights), (weights.unsqueeze(-1) * table[support]).sum(1), weights)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_what_support_and_embedding_keep_is_proportional_to_k_and_independent_of_v(softcap):
    """From hidden states to relaxed embedding: no [N, V] and no [N, K, D] is kept."""

    def kept(v, k, d=16):
        head, h = make_head(v=v, d=d, dtype=torch.float32, softcap=softcap), hidden(d=d, dtype=torch.float32)
        support = torch.randint(v, (N, k))

        def forward():
            y = support_logits(head, h, support).softmax(-1)
            return weighted_embedding(head.weight, support, y)

        return kept_bytes(forward)[1]

    assert kept(4000, 8) == kept(1000, 8)
    growth = kept(4000, 16) - kept(4000, 8)
    assert growth > 0
    assert kept(4000, 32) - kept(4000, 16) == 2 * growth
    assert kept(4000, 32) < N * 4000 * 4 / 10


@pytest.mark.parametrize("vocab", [1000, 3000])
def test_a_row_function_keeps_one_hidden_state_per_row_and_nothing_without_gradient(vocab):
    head, h, ref = make_head(v=vocab, dtype=torch.float32), hidden(dtype=torch.float32), hidden(seed=3).float().detach()
    values = torch.rand(vocab)
    expected = lambda *given: expected_values(*given, lambda rows: values)  # noqa: E731
    for function in (self_certainty, entropy, expected, lambda head, h: kl_divergence(head, h, head, ref)):
        assert saved_bytes(lambda function=function: function(head, h), exclude=[h, head.weight]) == N * D * 4
        with torch.no_grad():
            assert saved_bytes(lambda function=function: function(head, h)) == 0


def test_forbidden_tokens_have_no_share_where_they_are_forbidden():
    head, h, ids = make_head(temperature=0.5), hidden(), torch.arange(N)
    where, banned = ids > 5, torch.isin(torch.arange(V), torch.tensor([1, 3]))
    logits = head(h).masked_fill(where[:, None] & banned, -torch.inf)
    want = logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    same(token_logps(head, h, ids, (1, 3), where), want, h)
