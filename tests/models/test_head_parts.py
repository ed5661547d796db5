"""The head's formulas, how many rows exist at once, and what is computed where, by hand."""

import math

import pytest
import torch
from torch import nn

from grade.models import head as module
from grade.models.embedding import EmbeddingTable
from grade.models.head import (
    Head,
    chunk_rows,
    entropy,
    kl_divergence,
    row_values,
    support_logits,
    token_logps,
    weighted_embedding,
    wide,
)


@pytest.mark.parametrize(
    ("vocab", "count", "rows"),
    [
        (2**16, 1, 64),  # 64 rows have 2^22 elements, as many as may be
        (2**16 + 1, 511, 32), (2**16 + 1, 512, 64), (2**16 + 1, 1, 32), (2**16 + 1, 10**6, 64),
        (2**17, 256, 32), (2**17 + 1, 255, 16), (2**17 + 1, 256, 32), (2**17 + 1, 127, 16), (2**17, 513, 64),
        (2**18 + 1, 127, 8), (2**18 + 1, 128, 16), (2**22, 7, 1), (2**22, 15, 1), (2**22, 16, 2), (2**23, 16, 2),
        (2**23, 15, 1), (2**23, 1, 1), (2**23, 0, 1), (1, 1, 64), (2**23, 31, 2), (2**23, 32, 4), (2**23, 511, 32),
    ],
)  # fmt: skip
def test_rows_are_halved_while_they_are_many_elements_and_few_chunks(vocab, count, rows):
    assert chunk_rows(vocab, count) == rows


@pytest.mark.parametrize(
    ("dtype", "want"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32),
     (torch.float64, torch.float64)],
)  # fmt: skip
def test_types_are_widened_to_float32_at_least(dtype, want):
    assert wide(dtype) == want
    head = Head(torch.ones(3, 2, dtype=dtype))
    h = torch.ones(1, 2, dtype=dtype)
    ids = torch.tensor([[0]])
    for got in (head(h), head.rows(h, ids), support_logits(head, h, ids), token_logps(head, h, ids[0]),
                entropy(head, h), kl_divergence(head, h, h), support_logits(head, h[:0], ids[:0])):  # fmt: skip
        assert got.dtype == want


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_logits_and_their_slope_are_the_formula(bias, scale, softcap, temperature):
    generator = torch.Generator().manual_seed(0)
    weight, b = torch.randn(5, 3, generator=generator).double(), torch.randn(5, generator=generator).double()
    h = torch.randn(2, 3, generator=generator).double()
    head = Head(weight, b if bias else None, scale, softcap, temperature)
    raw = (h @ weight.T + (b if bias else 0)).requires_grad_()
    want = scale * raw
    want = (softcap * (want / softcap).tanh() if softcap else want) / temperature
    torch.testing.assert_close(head(h), want.detach())
    (slope,) = torch.autograd.grad(want.sum(), raw)
    torch.testing.assert_close(head.slope(want.detach()) * torch.ones_like(slope), slope)
    ids = torch.tensor([[4, 0], [1, 1]])
    torch.testing.assert_close(head.rows(h, ids), want.detach().gather(1, ids))


def test_a_head_is_plain_unless_it_is_told_more():
    head = Head(torch.ones(2, 1))
    assert (head.bias, head.scale, head.softcap, head.temperature) == (None, 1.0, None, 1.0)
    table = EmbeddingTable(torch.tensor([[1.0], [2.0]]))
    assert table.scale == 1.0 and table.embed(torch.tensor([[1, 0]])).tolist() == [[[2.0], [1.0]]]
    assert EmbeddingTable(table.weight, 3.0).embed(torch.tensor([1])).tolist() == [[6.0]]


class Counted(Head):
    """Notes which way logits are computed, and for how many rows."""

    def __call__(self, hidden):
        self.calls.append(("all", len(hidden)))
        return super().__call__(hidden)

    def rows(self, hidden, ids):
        self.calls.append(("some", len(hidden)))
        return super().rows(hidden, ids)


def counted(vocab, dim=1):
    head = Counted(torch.arange(float(vocab)).unsqueeze(1).expand(vocab, dim))
    object.__setattr__(head, "calls", [])
    return head


@pytest.mark.parametrize(
    ("vocab", "k", "way"), [(64, 7, "some"), (64, 8, "all"), (64, 9, "all"), (64, 64, "all"), (63, 7, "some"),
                            (65, 8, "some"), (65, 9, "all")]
)  # fmt: skip
def test_rows_are_gathered_while_they_are_less_than_an_eighth(vocab, k, way):
    head, h = counted(vocab), torch.tensor([[1.0], [2.0]])
    support = torch.arange(k).expand(2, k)
    got = support_logits(head, h, support)
    assert got.tolist() == [list(map(float, range(k))), [2.0 * i for i in range(k)]]
    assert head.calls == [(way, 2)]


def test_rows_that_are_gathered_at_once_have_at_most_so_many_elements(monkeypatch):
    assert module.GATHER_ELEMENTS == 2**24  # 64 MiB in float32
    support = torch.zeros(7, 2, dtype=torch.long)
    for most, parts in ((18, [3, 3, 1]), (23, [3, 3, 1]), (24, [4, 3]), (5, [1] * 7), (6, [1] * 7), (1, [1] * 7)):
        monkeypatch.setattr(module, "GATHER_ELEMENTS", most)
        head = counted(64, 3)
        assert support_logits(head, torch.ones(7, 3), support).shape == (7, 2)
        assert head.calls == [("some", n) for n in parts]


@pytest.mark.parametrize("k", [8, 64])
def test_dense_rows_are_computed_in_chunks(k, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 4)
    head = counted(64)
    support_logits(head, torch.ones(9, 1), torch.arange(k).expand(9, k))
    assert head.calls == [("all", 4), ("all", 4), ("all", 1)]
    head.calls.clear()
    row_values(head, torch.ones(9, 1), lambda logits, needed, others: (logits.sum(-1), None))
    assert head.calls == [("all", 4), ("all", 4), ("all", 1)]


def test_no_rows_have_no_logits():
    for k in (2, 63, 64):
        got = support_logits(counted(64), torch.ones(0, 1), torch.zeros(0, k, dtype=torch.long))
        assert got.shape == (0, k) and got.dtype == torch.float32


def test_the_last_rows_of_others_go_with_theirs(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ROWS", 2)
    seen = []

    def of_logits(logits, needed, others):
        seen.append((needed, [x.tolist() for x in others]))
        return logits.sum(-1), torch.ones_like(logits) if needed else None

    h = torch.arange(3.0).unsqueeze(1).requires_grad_()
    values = row_values(Head(torch.tensor([[1.0], [2.0]])), h, of_logits, torch.arange(3), torch.arange(6).view(3, 2))
    assert values.tolist() == [0.0, 3.0, 6.0]
    assert seen == [(True, [[0, 1], [[0, 1], [2, 3]]]), (True, [[2], [[4, 5]]])]
    (grad,) = torch.autograd.grad(values, h, torch.tensor([1.0, 10.0, 100.0]))
    assert grad.tolist() == [[3.0], [30.0], [300.0]]
    seen.clear()
    assert not row_values(Head(torch.ones(2, 1)), h.detach(), of_logits).requires_grad and not seen[0][0]


def test_a_hidden_states_gradient_has_its_own_type():
    head = Head(torch.ones(4, 2, dtype=torch.bfloat16), softcap=3.0)
    h = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
    for value in (support_logits(head, h, torch.zeros(2, 1, dtype=torch.long)), entropy(head, h),
                  token_logps(head, h, torch.tensor([0, 1]))):  # fmt: skip
        assert torch.autograd.grad(value.sum(), h)[0].dtype == torch.bfloat16


def test_weights_take_the_tables_type_and_keep_their_gradient():
    table = torch.tensor([[1.0], [2.0], [4.0]], dtype=torch.float64)
    for support in (torch.tensor([[2, 0]]), torch.tensor([[0, 1, 2]])):
        weights = torch.full(support.shape, 0.5, requires_grad=True)
        got = weighted_embedding(table, support, weights)
        assert got.dtype == torch.float64 and got.item() == 0.5 * float(table[support].sum())
        (grad,) = torch.autograd.grad(got.sum(), weights)
        assert grad.dtype == torch.float32 and torch.equal(grad, table[support].squeeze(-1).float())
    trained = nn.Parameter(table)
    assert not weighted_embedding(trained, torch.tensor([[0, 1, 2]]), torch.ones(1, 3)).requires_grad  # it is frozen
    assert not weighted_embedding(trained, torch.tensor([[0, 1]]), torch.ones(1, 2)).requires_grad


def two_tokens(*odds, **more):
    """A head whose logits for a state of 1 are log odds, in float64."""
    return Head(torch.tensor(odds, dtype=torch.float64).log().unsqueeze(1), **more)


ONE = torch.ones(1, 1, dtype=torch.float64)


def test_scores_by_hand():
    head = two_tokens(1.0, 3.0)  # p = 1/4, 3/4
    assert token_logps(head, ONE, torch.tensor([0])).item() == pytest.approx(math.log(1 / 4), abs=1e-15)
    want = -(math.log(1 / 4) / 4 + 3 * math.log(3 / 4) / 4)
    assert entropy(head, ONE).item() == pytest.approx(want, abs=1e-15)
    hot = two_tokens(1.0, 9.0)  # at temperature 2: 1/4, 3/4 again
    assert token_logps(hot, ONE, torch.tensor([1]), 2.0).item() == pytest.approx(math.log(3 / 4), abs=1e-15)
    assert entropy(hot, ONE, 2.0).item() == pytest.approx(want, abs=1e-15)
    own = two_tokens(1.0, 9.0, temperature=2.0)
    assert entropy(own, ONE).item() == pytest.approx(want, abs=1e-15)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_forbidden_tokens_share_nothing_where_they_are_forbidden(temperature):
    odds = [1.0, 2.0, 5.0, 8.0]
    head, ids = two_tokens(*odds), torch.tensor([0, 0, 3])
    h = ONE.repeat(3, 1).requires_grad_()
    where = torch.tensor([True, False, False])
    got = token_logps(head, h, ids, temperature, (1, 3), where)
    powers = [o ** (1 / temperature) for o in odds]
    want = [powers[0] / (powers[0] + powers[2]), powers[0] / sum(powers), powers[3] / sum(powers)]
    torch.testing.assert_close(got.exp(), torch.tensor(want, dtype=torch.float64))
    (grad,) = torch.autograd.grad(got.sum(), h)
    # d log p / dh = (x_id - E x) / t with x = log odds, the mean over what is allowed.
    x = [math.log(o) for o in odds]
    means = [(powers[2] * x[2]) / (powers[0] + powers[2])]
    means += [sum(p * v for p, v in zip(powers, x, strict=True)) / sum(powers)] * 2
    slopes = [(x[i] - mean) / temperature for i, mean in zip((0, 0, 3), means, strict=True)]
    torch.testing.assert_close(grad.squeeze(1), torch.tensor(slopes, dtype=torch.float64))
    for nowhere in ({"forbidden": (), "where": where}, {"forbidden": (1, 3), "where": None}):
        got = token_logps(head, h, ids, temperature, **nowhere)
        torch.testing.assert_close(got, token_logps(head, h, ids, temperature))


def test_kl_is_of_the_policy_from_the_reference_and_its_gradient_is_the_policys():
    head = two_tokens(1.0, 3.0)
    h, ref = ONE.clone().requires_grad_(), (ONE * 0).requires_grad_()
    kl = kl_divergence(head, h, ref)
    p, q = [1 / 4, 3 / 4], [1 / 2, 1 / 2]
    want = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl.item() == pytest.approx(want, abs=1e-15)
    kl.sum().backward()
    # dKL/dh = sum_v p_v (log p_v - log q_v - KL) log odds_v
    assert h.grad.item() == pytest.approx(3 / 4 * (math.log(3 / 2) - want) * math.log(3), abs=1e-15)
    assert ref.grad is None


def test_tables_that_a_row_function_reads_are_whole_meanwhile(monkeypatch):
    import contextlib

    seen = []

    @contextlib.contextmanager
    def whole(*tables):
        seen.append(tables)
        yield

    monkeypatch.setattr("grade.models.sharding.whole", whole)
    head, other = two_tokens(1.0, 2.0), torch.ones(1)

    def of_logits(logits, needed, others):
        return logits.sum(-1), None

    row_values(head, ONE, of_logits)
    of_logits.reads = (other,)
    row_values(head, ONE, of_logits)
    support_logits(head, ONE, torch.tensor([[0]]))
    assert [[id(t) for t in tables] for tables in seen] == [[id(head.weight)], [id(head.weight), id(other)],
                                                            [id(head.weight)]]  # fmt: skip
