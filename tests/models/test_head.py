"""Lean against naive, forward and backward, in float64; and what is kept for backward."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import saved_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.experiments.traced import kept_bytes
from grade.models import head as vocab
from grade.models.head import (
    Head,
    embedding_values,
    expected_values,
    kl_and_entropy,
    kl_divergence,
    self_certainty,
    support_logits,
    token_logps,
    token_scores,
    weighted_embedding,
)

N, D, V, K = 9, 5, 130, 4  # V is not a multiple of anything convenient

HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"scale": 0.7},
    "soft cap": {"softcap": 2.0, "scale": 1.3, "bias": True},
    "soft cap, sampled at 0.7": {"softcap": 2.0, "temperature": 0.7},
    "token bias": {"token_bias": True, "temperature": 0.7},
    "soft cap and token bias": {"softcap": 2.0, "scale": 1.3, "token_bias": True, "temperature": 0.7},
}


def make_head(bias=False, dtype=torch.float64, v=V, d=D, token_bias=False, **rest):
    """A head; its token bias requires a gradient."""
    if token_bias:
        rest["token_bias"] = randn(v, seed=2, dtype=vocab.wide(dtype)).requires_grad_()
    return Head(randn(v, d, seed=1, dtype=dtype), randn(v, seed=3, dtype=dtype) if bias else None, **rest)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def hidden(n=N, d=D, seed=2, dtype=torch.float64):
    return randn(n, d, seed=seed, dtype=dtype).requires_grad_()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(vocab, "CHUNK_ROWS", 4)
    monkeypatch.setattr(vocab, "GATHER_ELEMENTS", 3 * K * D)


def same(got, want, x, head=None):
    """Values, and their gradients in x, and in the head's token bias if it has one, along a random vector."""
    torch.testing.assert_close(got, want)
    weight, inputs = torch.randn_like(want), [x]
    if head is not None and head.token_bias is not None:
        inputs.append(head.token_bias)
    torch.testing.assert_close(*(torch.autograd.grad(y, inputs, weight, retain_graph=True) for y in (got, want)))


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("k", [K, 40, V])  # gathered rows; dense, then gathered; the full vocabulary
def test_support_logits_against_dense(options, k):
    head, h = make_head(**options), hidden()
    support = torch.stack([torch.randperm(V)[:k] if k < V else torch.arange(V) for _ in range(N)])
    same(support_logits(head, h, support), head(h).gather(1, support), h, head)


@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_row_functions_against_autograd_on_dense_logits(options):
    head, h, ref, ids = make_head(**options), hidden(), hidden(seed=3), torch.arange(N) * 7
    ref_head = replace(head, token_bias=None)
    logp, ref_logp = head(h).log_softmax(-1), ref_head(ref).log_softmax(-1).detach()
    same(kl_divergence(head, h, ref_head, ref), (logp.exp() * (logp - ref_logp)).sum(-1), h, head)
    same(self_certainty(head, h), -logp.mean(-1) - math.log(V), h, head)
    same(token_logps(head, h, ids), logp.gather(1, ids[:, None]).squeeze(1), h, head)


@pytest.mark.parametrize("kl_gradient", [True, False])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_scores_from_one_product_are_those_of_each_function(options, kl_gradient):
    """Values and gradients to the bit; KL and entropy are of all tokens, the log-probabilities of those allowed."""
    head, h, ref, ids = make_head(**options), hidden(), hidden(seed=3), torch.arange(N)
    ref_head, where = replace(head, token_bias=None), ids > 5
    *scores, entropy = token_scores(head, h, ids, (1, 3), where, (ref_head, ref), kl_gradient)
    wants = token_logps(head, h, ids, (1, 3), where), kl_divergence(head, h, ref_head, ref)
    inputs = [h, *([] if head.token_bias is None else [head.token_bias])]
    for got, want in list(zip(scores, wants, strict=True))[: 1 + kl_gradient]:
        grads = [torch.autograd.grad(y.sum(), inputs, retain_graph=True) for y in (got, want)]
        assert torch.equal(got, want) and all(map(torch.equal, *grads))
    both = [torch.autograd.grad(one + (two if kl_gradient else 0 * one), inputs, torch.arange(N) + 1.0)
            for one, two in (scores, wants)]  # fmt: skip
    torch.testing.assert_close(*both)
    assert torch.equal(scores[1], wants[1]) and scores[1].requires_grad == kl_gradient
    assert torch.equal(entropy, kl_and_entropy(head, h, ref_head, ref)[1]) and not entropy.requires_grad
    assert torch.equal(entropy, token_scores(head, h, ids, (1, 3), where)[1])
    logp = head(h).log_softmax(-1)
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1).detach())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_token_bias_is_added_between_soft_cap_and_temperature(softcap):
    options = dict(softcap=softcap, scale=1.3, bias=True)
    head, h = make_head(**options, token_bias=True, temperature=0.7), hidden()
    want = (make_head(**options)(h) + head.token_bias) / 0.7
    torch.testing.assert_close(head(h), want)
    ids = torch.randint(V, (N, K))
    torch.testing.assert_close(head.rows(h, ids), want.gather(1, ids))


def test_a_trained_token_bias_keeps_what_makes_the_logits_and_none_of_them():
    """Hidden states, the reference's and the gradient in hidden states: N D numbers each, whatever V is."""

    def kept(v):
        head, h, ref = make_head(v=v, dtype=torch.float32, token_bias=True), hidden(dtype=torch.float32), hidden(seed=3)
        ref, ref_head = ref.float().detach(), replace(head, token_bias=None)
        exclude = [head.weight, head.token_bias]
        return saved_bytes(lambda: kl_divergence(head, h, ref_head, ref), exclude=exclude)

    assert kept(3000) == kept(1000) == 3 * N * D * 4


def test_entropies_beside_a_row_function_change_neither_its_gradients_nor_what_is_kept():
    """In backward the logits are computed again for the token bias, the entropies are not."""
    head, ref = make_head(token_bias=True, temperature=0.7, v=3000), hidden(seed=3)
    ref_head, results = replace(head, token_bias=None), []
    for function in (kl_divergence, lambda *args: kl_and_entropy(*args)[0]):
        h = hidden()
        kept = saved_bytes(lambda h=h, function=function: function(head, h, ref_head, ref))
        kl = function(head, h, ref_head, ref)
        results.append([kl, *torch.autograd.grad(kl.sum(), [h, head.token_bias]), torch.tensor(kept)])
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


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

        return kept_bytes(forward)

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
    for function in (self_certainty, expected, lambda head, h: kl_divergence(head, h, head, ref)):
        assert saved_bytes(lambda function=function: function(head, h), exclude=[h, head.weight]) == N * D * 4
        with torch.no_grad():
            assert saved_bytes(lambda function=function: function(head, h)) == 0


@pytest.mark.parametrize("forbidden", [(), (3, 0, 129)])
@pytest.mark.parametrize("shape", [(N, V), (1, V), (V,)], ids=str)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_expectations_and_gradients_against_dense_logits(options, shape, forbidden):
    head, h, s = make_head(**options), hidden(), randn(*shape, seed=4)
    where = torch.arange(N) % 3 != 0
    logits = head(h)
    if forbidden:
        out = torch.zeros(N, V, dtype=torch.bool)
        out[:, list(forbidden)] = where.unsqueeze(1)
        logits = logits.masked_fill(out, -torch.inf)
    want = (logits.softmax(-1) * s).sum(-1)
    got = expected_values(head, h, lambda rows: s[rows] if shape == (N, V) else s, forbidden, where)
    same(got, want, h, head)


def test_a_half_precision_model_has_float32_expectations():
    """bfloat16 products of D = 5 terms are off by 2^-8 of their largest; a softmax in bfloat16 would be off by more."""
    head, h = make_head(dtype=torch.bfloat16), hidden(dtype=torch.bfloat16)
    table, u = randn(V, D, seed=5, dtype=torch.bfloat16), randn(N, D, seed=6)
    values = embedding_values(table, 0.5, u)
    assert values(torch.arange(2)).dtype == torch.float32
    got = expected_values(head, h, values)
    p, s = head(h).softmax(-1).double(), values(torch.arange(N)).double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), (p * s).sum(-1))  # float32 rounding only: same logits, same values


def test_forbidden_tokens_have_no_share_where_they_are_forbidden():
    head, h, ids = make_head(temperature=0.5, token_bias=True), hidden(), torch.arange(N)
    where, banned = ids > 5, torch.isin(torch.arange(V), torch.tensor([1, 3]))
    logits = head(h).masked_fill(where[:, None] & banned, -torch.inf)
    want = logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    same(token_logps(head, h, ids, (1, 3), where), want, h, head)
