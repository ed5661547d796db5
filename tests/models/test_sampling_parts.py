"""Sampling, scores, noise and the quick products, one function at a time."""

import contextlib
import math

import pytest
import torch
from conftest import EOS, VOCAB, make_backbone, make_prompts
from torch.nn import functional as F

from grade.errors import InputError
from grade.models import decode_linear
from grade.models.decode_linear import SkinnyLinear, _fits, skinny_linear, skinny_products
from grade.models.noise import NoiseBlocks, exponential_noise, gumbel_noise
from grade.models.sampling import Decoder, check_finite, check_length, generate, is_eos
from grade.models.scoring import Scores, check_shapes, score, score_hidden, sequence_kl
from grade.models.self_certainty import completion_certainty, self_certainty


def logits_after(backbone, prompts, ids):
    """Of whole passes: the logits that each token of completions was drawn from."""
    embeds = backbone.embed(torch.cat([prompts.ids, ids[:, :-1]], 1))
    with torch.no_grad():
        hidden = backbone.hidden(embeds, prompts.mask_with(ids.shape[1] - 1))
    return backbone.head(hidden)[:, prompts.ids.shape[1] - 1 :]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_a_token_is_the_largest_of_logits_over_temperature_plus_noise(backbone, temperature):
    prompts, draws, source = make_prompts(), [], torch.Generator().manual_seed(0)

    def noise(shape):
        draws.append(gumbel_noise(shape, source))
        return draws[-1]

    logps = [] if temperature else None
    ids, mask = generate(backbone, prompts, 4, noise, temperature, stop_early=False, logps=logps)
    logits = logits_after(backbone, prompts, ids)
    assert len(draws) == (4 if temperature else 0)
    scores = logits / temperature + torch.stack(draws, 1) if temperature else logits
    assert torch.equal(ids, scores.argmax(-1)) and ids.dtype == mask.dtype == torch.int64
    if temperature:
        want = (logits / temperature).log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(torch.stack(logps, 1), want)
        again = generate(backbone, prompts, 4, torch.Generator().manual_seed(0), temperature, stop_early=False)[0]
        assert torch.equal(again, ids)  # a generator gives the same noise


def test_without_more_it_samples_the_policy_itself_and_stops_early(backbone):
    prompts = make_prompts()
    plain = generate(backbone, prompts, 30, torch.Generator().manual_seed(1))
    told = generate(backbone, prompts, 30, torch.Generator().manual_seed(1), 1.0, 0, True, None)
    for one, two in zip(plain, told, strict=True):
        assert torch.equal(one, two)
    ids, mask = plain
    assert ids.shape[1] < 30 and ids.shape[1] == int(mask.sum(1).max())
    for row, real in zip(ids, mask, strict=True):
        ends = torch.isin(row, torch.tensor(EOS)).nonzero().flatten()
        assert int(real.sum()) == int(ends[0]) + 1 and (real.diff() <= 0).all()
    long_ids, long_mask = generate(backbone, prompts, 30, torch.Generator().manual_seed(1), stop_early=False)
    assert long_ids.shape == (3, 30) and torch.equal(long_ids[:, : ids.shape[1]], ids)
    assert torch.equal(long_mask[:, : ids.shape[1]], mask) and not long_mask[:, ids.shape[1] :].any()


def test_lengths_and_temperatures_at_their_bounds(backbone):
    prompts = make_prompts()
    for settings, message in (
        (dict(max_new_tokens=0), "max_new_tokens: got 0; allowed: at least 1"),
        (dict(temperature=-0.1), "temperature"), (dict(temperature=math.inf), "temperature: got inf"),
        (dict(temperature=math.nan), "temperature"), (dict(max_new_tokens=60), "got 65; allowed: at most 64"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            generate(backbone, prompts, **{"max_new_tokens": 1} | settings, generator=torch.Generator())
    for settings in (dict(max_new_tokens=1), dict(max_new_tokens=59, temperature=0.25), dict(temperature=0)):
        generate(backbone, prompts, **{"max_new_tokens": 1} | settings, generator=torch.Generator())
    check_length(backbone, 64)
    with pytest.raises(InputError, match=r"max_prompt_tokens \+ max_new_tokens: got 65; allowed: at most 64 "):
        check_length(backbone, 65)


@pytest.mark.parametrize(
    ("values", "alive", "message"),
    [
        ([0.0, -1.0], [1, 1], None), ([math.nan, -1.0], [0, 1], None), ([math.inf, -math.inf], [0, 0], None),
        ([math.nan, -1.0], [1, 1], "NaN or infinity for 1 of 2 prompts"), ([math.inf, 0.0], [1, 0], "for 1 of 2"),
        ([-math.inf, math.nan], [1, 1], "for 2 of 2"), ([math.nan, math.nan], [0, 1], "for 1 of 2"),
    ],
)  # fmt: skip
def test_logits_of_running_completions_are_finite(values, alive, message):
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        check_finite(torch.tensor(values), torch.tensor(alive).bool())


@pytest.mark.parametrize("row", [0, 1, 2])
def test_the_row_that_is_not_finite_is_the_one_that_counts(row, backbone):
    class Broken:
        weight = backbone.head.weight

        def __call__(self, hidden):
            logits = torch.zeros(len(hidden), VOCAB)
            logits[row] = math.nan
            return logits

    backbone.head = Broken()
    with pytest.raises(InputError, match="NaN or infinity for 1 of 3 prompts"):
        generate(backbone, make_prompts(), 2, torch.Generator(), 0.0)


def test_ends_are_found_by_id():
    ids = torch.tensor([[2, 3], [7, 12]])
    assert is_eos(ids, (2, 12)).tolist() == [[True, False], [False, True]]
    none = is_eos(ids, ())
    assert none.dtype == torch.bool and none.tolist() == [[False, False], [False, False]]


def test_a_decoder_goes_on_where_the_prompt_ends(backbone):
    prompts = make_prompts()
    decoder, ids = Decoder(backbone, prompts), torch.tensor([[3, 4], [5, 6], [8, 9]])
    want = logits_after(backbone, prompts, torch.cat([ids, ids[:, :1]], 1))
    for step in range(2):
        torch.testing.assert_close(decoder.logits().detach(), want[:, step])
        decoder.advance(backbone.embed(ids[:, step]))
        assert torch.equal(decoder.mask, prompts.mask_with(step + 1))
    torch.testing.assert_close(decoder.logits().detach(), want[:, 2])


def test_a_process_goes_on_while_another_one_does(backbone):
    """Its own completions have ended; it takes part in the passes and writes no more."""
    asked = []
    backbone.anywhere = lambda flag: asked.append(flag) or len(asked) < 4

    def ending(shape):
        noise = torch.zeros(shape)
        noise[:, EOS[0]] = 1e6
        return noise

    passes, decode = [], backbone.decode
    backbone.decode = lambda *args: passes.append(0) or decode(*args)
    ids, mask = generate(backbone, make_prompts(), 9, ending)
    assert ids.tolist() == [[EOS[0]]] * 3 and mask.tolist() == [[1]] * 3
    assert asked == [False] * 4 and len(passes) == 4  # the prompt's, and one after each answer that said so
    asked.clear()
    generate(backbone, make_prompts(), 1, ending)
    assert asked == []  # after the last token no one is asked


# ---- scores ----
def test_kl_of_sequences_is_the_policys_from_the_bases(backbone):
    prompts, ids = make_prompts(), torch.randint(3, VOCAB, (3, 4), generator=torch.Generator().manual_seed(5))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    logp = logits_after(backbone, prompts, ids).log_softmax(-1)
    with backbone.reference():
        ref = logits_after(backbone, prompts, ids).log_softmax(-1)
    got = sequence_kl(backbone, prompts, ids, mask)
    torch.testing.assert_close(got, (logp.exp() * (logp - ref)).sum(-1) * mask)
    assert not got.requires_grad and got.shape == (3, 4)


@pytest.mark.parametrize(
    ("ids", "mask", "good"),
    [((3, 2), (3, 2), True), ((3, 1), (3, 1), True), ((3, 0), (3, 0), False), ((2, 2), (2, 2), False),
     ((3, 2), (3, 1), False), ((3,), (3,), False), ((3, 2, 1), (3, 2, 1), False), ((4, 2), (4, 2), False)],
)  # fmt: skip
def test_a_completion_for_each_prompt(ids, mask, good):
    arguments = make_prompts(), torch.zeros(ids), torch.zeros(mask)
    with contextlib.nullcontext() if good else pytest.raises(ValueError, match=r"not \[3, T\] with T >= 1"):
        check_shapes(*arguments)


def test_scores_are_log_probabilities_of_the_whole_policy_unless_told_more(backbone):
    prompts, ids = make_prompts(), torch.full((3, 2), 13)
    mask = torch.ones_like(ids)
    plain = score(backbone, prompts, ids, mask)
    told = score(backbone, prompts, ids, mask, ("logps",), 1.0, 0)
    assert torch.equal(plain.logps, told.logps) and plain.entropy is None and plain.self_certainty is None
    assert Scores() == Scores(None, None, None)
    with pytest.raises(InputError, match="temperature"):
        score(backbone, prompts, ids, mask, temperature=math.inf)
    score(backbone, prompts, ids, mask, temperature=0.5)


def test_an_end_is_too_early_only_where_it_counts(backbone):
    ids = torch.full((3, 3), 13)
    ids[1, 1:] = EOS[0]
    real = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1]])
    hidden = torch.zeros(3, 3, backbone.hidden_size, dtype=torch.float64)
    score_hidden(backbone, hidden, ids, real, ("logps",), min_new_tokens=3)  # padding may hold any id
    real[1] = 1
    score_hidden(backbone, hidden, ids, real, ("entropy", "self_certainty"), min_new_tokens=3)  # without the tokens
    score_hidden(backbone, hidden, ids, real, ("logps",), min_new_tokens=1)
    with pytest.raises(InputError, match="min_new_tokens = 2"):
        score_hidden(backbone, hidden, ids, real, ("logps",), min_new_tokens=2)
    backbone.eos_token_ids = ()
    found = score_hidden(backbone, hidden, ids, real, ("logps",), min_new_tokens=2)
    torch.testing.assert_close(found.logps, torch.full((3, 3), -math.log(VOCAB), dtype=torch.float64))  # uniform


def test_a_completions_certainty_is_that_of_its_tokens():
    values = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    assert completion_certainty(values, torch.tensor([[1, 1], [0, 1]])).tolist() == [2.0, 7.0]
    with pytest.raises(ValueError, match=r"completions of \[1, 0\] tokens"):
        completion_certainty(values, torch.tensor([[1, 0], [0, 0]]))


def test_certainty_is_of_the_policy_itself_unless_a_temperature_is_given(backbone):
    h = torch.randn(2, backbone.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(self_certainty(backbone.head, h), self_certainty(backbone.head, h, 1.0))
    self_certainty(backbone.head, h, 0.5)


# ---- noise ----
def test_gumbel_noise_is_minus_the_logarithm_of_an_exponential():
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    noise = gumbel_noise((4, 5), one)
    assert torch.equal(noise, -exponential_noise((4, 5), two, "cpu").log()) and noise.dtype == torch.float32
    many = gumbel_noise((100_000,), torch.Generator().manual_seed(0)).double()
    # Five standard errors: pi / sqrt(6 n), and sqrt((kappa - 1) / n) of the variance with kappa = 5.4.
    assert abs(float(many.mean()) - 0.57722) < 5 * 1.2825 / 100_000**0.5
    assert abs(float(many.var()) / (math.pi**2 / 6) - 1) < 5 * (4.4 / 100_000) ** 0.5


def test_noise_is_finite_also_where_an_exponential_is_zero(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.zero_())
    assert exponential_noise((2,), torch.Generator(), "cpu").tolist() == [2.0**-126] * 2
    assert gumbel_noise((1,), torch.Generator()).item() == pytest.approx(126 * math.log(2))
    assert gumbel_noise((1,), torch.Generator(), "meta").device.type == "meta"


def test_noise_of_rows_has_the_shape_of_the_logits():
    noise = NoiseBlocks(torch.Generator().manual_seed(0), 5, 4, 2, 2)
    draw = noise.rows(1, 4)
    assert draw((3, 4)).shape == (3, 4)
    with pytest.raises(ValueError, match=r"noise of shape \(3, 4\) for logits of shape \(2, 4\)"):
        draw((2, 4))


@pytest.mark.parametrize("order", [[(0, 5)], [(0, 2), (2, 5)], [(3, 5), (0, 3)], [(4, 5), (1, 2), (0, 1), (2, 4)]])
def test_noise_of_a_prompt_is_its_own_in_any_order(order):
    """Blocks 0-1, 2-3 and 4: drawn one after the other, a block's tokens first."""
    source = torch.Generator().manual_seed(0)
    want = torch.cat([torch.stack([gumbel_noise((n, 4), source) for _ in range(2)], 1) for n in (2, 2, 1)])
    noise = NoiseBlocks(torch.Generator().manual_seed(0), 5, 4, 2, 2)
    for start, stop in order:
        draw = noise.rows(start, stop)
        got = torch.stack([draw((stop - start, 4)) for _ in range(2)], 1)
        assert torch.equal(got, want[start:stop])


# ---- products of few rows ----
@pytest.mark.parametrize(("rows", "widths"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4])])
def test_at_most_four_columns_at_a_time(rows, widths, monkeypatch):
    seen, product = [], torch.mm
    monkeypatch.setattr(decode_linear.torch, "mm", lambda a, b: seen.append(tuple(b.shape)) or product(a, b))
    x, weight = torch.ones(rows, 3), torch.ones(2, 3)
    torch.testing.assert_close(skinny_linear(x, weight), torch.full((rows, 2), 3.0))
    assert seen == [(3, n) for n in widths]


@pytest.mark.parametrize(
    ("shape", "dtype", "weight", "fits"),
    [
        ((2, 3), torch.float32, torch.float32, True), ((8, 3), torch.float32, torch.float32, True),
        ((1, 3), torch.float32, torch.float32, False), ((9, 3), torch.float32, torch.float32, False),
        ((2, 4, 3), torch.float32, torch.float32, True), ((3, 3, 3), torch.float32, torch.float32, False),
        ((2, 3), torch.float64, torch.float64, False), ((2, 3), torch.float32, torch.float64, False),
        ((2, 3), torch.float64, torch.float32, False), ((2, 0), torch.float32, torch.float32, False),
    ],
)  # fmt: skip
def test_which_products_are_few_rows(shape, dtype, weight, fits):
    assert _fits(torch.ones(shape, dtype=dtype), torch.ones(2, shape[-1], dtype=weight)) is fits
    meta = torch.ones(shape, dtype=dtype, device="meta")
    assert not _fits(meta, torch.ones(2, shape[-1], dtype=weight, device="meta"))


@pytest.mark.parametrize(
    ("device", "dtype", "taken"),
    [("cpu", torch.float32, True), ("cpu", torch.float64, False), ("meta", torch.float32, False)],
)
def test_the_mode_is_entered_only_where_it_does_something(device, dtype, taken):
    assert isinstance(skinny_products(torch.ones(1, 1, device=device, dtype=dtype)), SkinnyLinear) is taken


def test_sampling_uses_them_for_float32(monkeypatch):
    calls = []
    monkeypatch.setattr(decode_linear, "skinny_linear", lambda *args: calls.append(0) or skinny_linear(*args))
    for dtype, used in ((torch.float32, True), (torch.float64, False)):
        generate(make_backbone(dtype=dtype), make_prompts(), 2, torch.Generator(), stop_early=False)
        assert bool(calls) is used
        calls.clear()
    with SkinnyLinear():
        got = F.linear(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([1.0, 2.0]))
        assert got.tolist() == [[4.0, 5.0]] * 2 and len(calls) == 1
        assert F.linear(torch.ones(2, 3), weight=torch.ones(2, 3)).tolist() == [[3.0, 3.0]] * 2 and len(calls) == 1
