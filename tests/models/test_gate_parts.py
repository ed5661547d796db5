"""Each check of the gate on a model whose numbers are known: how much it lets pass, in every type."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grade.errors import InputError
from grade.models.gate import (
    _close,
    _louder,
    _Probe,
)
from grade.models.head import Head

VOCAB, WIDTH = 11, 3
LIMITS = {torch.float64: (1e-6, 1e-6), torch.float32: (1e-5, 1e-4), torch.float16: (1e-2, 0.1),
          torch.bfloat16: (1e-2, 0.1)}  # fmt: skip
"""How far logits may be from ``head(hidden)``, and one order of the computation from another."""


class Base:
    """Hidden states are the embeddings plus half the mean of those before: causal, blind to padding.

    ``spoil(name, number, tensor)`` is called with what each call returns, the calls of a name counted from 1.
    """

    def __init__(self, dtype=torch.float32, spoil=lambda name, number, tensor: tensor, vocab=VOCAB, size=1.0):
        generator = torch.Generator().manual_seed(0)
        self.embedding_weight = torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        self.layer = nn.Linear(WIDTH, vocab, bias=False, dtype=dtype)
        self.layer.weight.data = (size * torch.randn(vocab, WIDTH, generator=generator, dtype=torch.float64)).to(dtype)
        self.dtype, self.device, self.vocab_size, self.embedding_scale = dtype, torch.device("cpu"), vocab, 1.0
        self.head, self._spoil, self.calls, self.switched = Head(self.layer.weight), spoil, [], []
        self.model = SimpleNamespace(
            get_output_embeddings=lambda: self.layer, supports_gradient_checkpointing=True, unhooked=0
        )
        self.model = _Callable(self.model, self._logits)

    def spoil(self, name, tensor):
        self.calls.append(name)
        return self._spoil(name, self.calls.count(name), tensor)

    def _logits(self, input_ids, attention_mask):
        hidden = self._states(self.embedding_weight[input_ids], attention_mask)
        return SimpleNamespace(logits=self.spoil("logits", self.layer(hidden)))

    def embed(self, ids):
        return self.spoil("embed", self.embedding_weight[ids])

    def _states(self, embeds, mask):
        weights = mask.to(embeds.dtype).unsqueeze(-1)
        sums = (embeds * weights).cumsum(1)
        return embeds + 0.5 * sums / weights.cumsum(1).clamp_min(1)

    def hidden(self, embeds, mask):
        self.seen = embeds, mask
        return self.spoil("hidden", self._states(embeds, mask))

    def new_cache(self):
        return []

    def decode(self, embeds, mask, cache):
        cache.append(embeds)
        return self.spoil("decode", self._states(torch.cat(cache, 1), mask)[:, -embeds.shape[1] :])

    @contextlib.contextmanager
    def checkpointed_layers(self, enabled):
        self.switched.append(enabled)
        yield


class _Callable:
    def __init__(self, values, forward):
        self.__dict__.update(values.__dict__)
        self.forward = forward

    def __call__(self, **kwargs):
        return self.forward(**kwargs)

    def disable_input_require_grads(self):
        self.unhooked += 1


def run(base):
    probe = _Probe(base)
    with torch.no_grad():
        probe.check_head()
        probe.check_one_function()
    probe.check_gradient()


def times(name, number, share):
    """What call ``number`` of ``name`` returns is larger by this share; 0: all calls."""
    return lambda other, at, tensor: tensor * (1 + share) if other == name and number in (at, 0) else tensor


CHECKS = {
    "head": (("logits", 1), 0, "logits are head"),
    "loud head": (("logits", 2), 0, "logits are head"),
    "randomness": (("hidden", 2), 0, "without randomness"),
    "embedding": (("embed", 2), 0, "a .scaled. row of one table"),
    "causal": (("hidden", 4), 1, "a causal model"),
    "padding": (("hidden", 5), 1, "do not depend on padding"),
    "cache": (("decode", 0), 1, "decodes on its cache"),
    "gradient": (("hidden", 7), 1, "the same gradient when its layers are recomputed"),
}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_lets_rounding_pass_and_nothing_larger(check, dtype):
    call, which, message = CHECKS[check]
    limit = LIMITS[dtype][which]
    # A part that is 1 + x times as large differs by x, or by x / (1 + x) of the larger one.
    run(Base(dtype, times(*call, 0.4 * limit)))
    with pytest.raises(InputError, match=message):
        run(Base(dtype, times(*call, 2 * limit)))


def test_a_type_without_a_row_of_its_own_has_the_wide_limits():
    probe = _Probe(Base())
    assert probe.tolerance == LIMITS[torch.float32][1]
    base = Base()
    base.dtype = torch.int8
    assert _Probe(base).tolerance == 0.1
    base._spoil = times("logits", 1, 0.004)
    with torch.no_grad():
        _Probe(base).check_head()
    base._spoil = times("logits", 3, 0.02)
    with torch.no_grad(), pytest.raises(InputError, match="logits are head"):
        _Probe(base).check_head()


def spoilt_at(name, number, place, value=float("nan")):
    def spoil(other, at, tensor):
        if (other, at) == (name, number):
            tensor = tensor.clone()
            tensor[place] = value
        return tensor

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_must_be_finite_and_where(value):
    for call in (("hidden", 1), ("logits", 1)):
        for place in ((0, 0, 0), (0, 5, 0)):
            with pytest.raises(InputError, match="finite logits in float32$"):
                run(Base(spoil=spoilt_at(*call, place, value)))
    beside = "finite logits in float32 beside padding on the left"
    for place in ((0, 0, 0), (1, 2, 1), (1, 5, 2)):
        with pytest.raises(InputError, match=beside):
            run(Base(spoil=spoilt_at("hidden", 3, place, value)))
    for place in ((1, 0, 0), (1, 1, 2)):  # at padding
        run(Base(spoil=spoilt_at("hidden", 3, place, value)))
    with pytest.raises(InputError, match="in float64 beside"):
        run(Base(torch.float64, spoilt_at("hidden", 3, (0, 0, 0), value)))

    def spoil(name, number, tensor):
        if (name, number) == ("hidden", 6):
            tensor.register_hook(lambda grad: grad * value)
        return tensor

    with pytest.raises(InputError, match="a finite gradient"):
        run(Base(spoil=spoil))


def test_logits_of_another_shape_are_refused():
    wide = Base(spoil=lambda name, number, x: torch.cat([x, x[..., :1]], -1) if (name, number) == ("logits", 1) else x)
    with pytest.raises(InputError, match="logits are head"):
        run(wide)


@pytest.mark.parametrize("call", [("hidden", 1), ("decode", 3)])
def test_embeddings_that_were_changed_in_place_are_noticed(call):
    base, embeds = Base(), []

    def spoil(name, number, tensor):
        if name == "embed":
            embeds.append(tensor)
        if (name, number) == call:
            embeds[-1][0, 0] += 1  # after it was read: only what is kept of it tells
        return tensor

    base._spoil = spoil
    with pytest.raises(InputError, match="leaves its inputs_embeds as they are"):
        run(base)
    probe = _Probe(Base())
    with pytest.raises(InputError, match="leaves its inputs_embeds"):
        probe.check_kept(torch.ones(2), torch.tensor([1.0, 1.5]))
    probe.check_kept(torch.ones(2), torch.ones(2))


def test_the_probe_is_two_rows_the_second_padded_by_two():
    probe = _Probe(Base())
    assert probe.ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2]]
    assert probe.mask.tolist() == [[1] * 6, [0, 0, 1, 1, 1, 1]]
    small = _Probe(Base(vocab=5))
    assert small.ids.tolist() == [[1, 2, 3, 4, 0, 1], [2, 1, 0, 4, 3, 2]]


def test_passes_are_those_that_the_page_names():
    """One row for the head; both; both with another last token; the second without its padding; decoded by 4, 1, 1."""
    seen = []
    base = Base()

    def spoil(name, number, tensor):
        if name == "hidden":
            seen.append((tuple(base.seen[0].shape), base.seen[1].tolist()))
        if name == "decode":
            seen.append((name, tuple(tensor.shape)))
        return tensor

    base._spoil = spoil
    run(base)
    both = [[1] * 6, [0, 0, 1, 1, 1, 1]]
    one, two = ((1, 6, WIDTH), [[1] * 6]), ((2, 6, WIDTH), both)
    decoded = [("decode", (2, n, WIDTH)) for n in (4, 1, 1)]
    assert seen == [one, one, two, two, ((1, 4, WIDTH), [[1] * 4]), *decoded, two, two]
    assert base.switched == [False, True]


def test_only_the_last_token_of_the_causal_check_is_another_one():
    base, seen = Base(), []

    def spoil(name, number, tensor):
        if name == "hidden" and number in (3, 4):
            seen.append(base.seen[0])
        return tensor

    base._spoil = spoil
    run(base)
    assert torch.equal(seen[0][:, :-1], seen[1][:, :-1]) and not torch.isclose(seen[0][:, -1], seen[1][:, -1]).any()


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1.0), (torch.float16, 1.0), (torch.float64, 1e-6)])
def test_the_loud_pass_has_logits_of_a_thousand(dtype, scale):
    base, loud = Base(dtype, size=scale), []
    base.layer.register_forward_hook(lambda module, inputs, output: loud.append((inputs[0], output)))
    with torch.no_grad():
        _Probe(base).check_head()
    quiet, heard = (float(output.abs().max()) for _, output in loud)
    rounding = 4 * torch.finfo(dtype).eps + 1e-6
    assert heard == pytest.approx(1000 * quiet / (quiet + 1e-3), rel=rounding)


def test_the_loud_pass_stays_within_a_type():
    """Small logits of large states: a quarter of float16's largest number, not a thousand."""
    base, loud = Base(torch.float16, size=1e-4), []
    base.embedding_weight = 64 * base.embedding_weight
    base.layer.register_forward_hook(lambda module, inputs, output: loud.append(inputs[0]))
    with torch.no_grad():
        _Probe(base).check_head()
    assert float(loud[1].abs().max()) == pytest.approx(65_504 / 4, rel=2e-3)  # rounding of a half, and the 1e-3


def test_a_head_that_the_model_does_not_call_is_not_made_louder():
    base = Base(spoil=times("logits", 2, 0.5))
    base.model.get_output_embeddings = lambda: nn.Linear(WIDTH, VOCAB)
    with torch.no_grad():
        _Probe(base).check_head()


def test_what_is_louder_and_until_when():
    head = nn.Bilinear(2, 2, 1, bias=False)
    seen = []
    head.register_forward_hook(lambda module, inputs, output: seen.append([x.tolist() for x in inputs]))
    x, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    with pytest.raises(KeyError), _louder(head, 10.0) as heard:
        assert heard == []
        head(x, y)
        assert heard == [10.0]
        raise KeyError
    head(x, y)
    assert seen == [[[[10.0, 20.0]], [[3.0, 4.0]]], [[[1.0, 2.0]], [[3.0, 4.0]]]] and heard == [10.0]


def test_the_gradient_is_of_a_weighted_sum_between_tokens():
    base = Base(torch.float64)
    base._states = lambda embeds, mask: embeds
    probe = _Probe(base)
    got = probe.gradient(False)
    embeds, mask = base.seen
    table = base.embedding_weight
    ids = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 6, 5, 4, 3, 2]])
    assert torch.equal(embeds, 0.5 * (table[ids] + table[ids.flip(1)])) and torch.equal(mask, probe.mask)
    assert embeds.requires_grad and not embeds.is_leaf  # a leaf may not be changed in place
    # Without padding's columns; from -1 to 1 in equal steps.
    want = torch.zeros(2, 6, WIDTH, dtype=torch.float64)
    want[:, 2:] = torch.linspace(-1, 1, 2 * 4 * WIDTH).view(2, 4, WIDTH)
    assert torch.equal(got, want) and base.switched == [False]
    with torch.no_grad():
        assert torch.equal(probe.gradient(True), want) and base.switched == [False, True]
    half = Base(torch.float16)
    assert _Probe(half).gradient(False).dtype == torch.float16


def test_a_hook_of_transformers_is_taken_away_unless_it_was_there():
    base = Base()
    run(base)
    assert base.model.unhooked == 1
    base = Base()
    base.model._require_grads_hook = object()
    run(base)
    assert base.model.unhooked == 0
    base = Base()
    base.model.supports_gradient_checkpointing = False
    run(base)
    assert base.model.unhooked == 0 and base.switched == [False]


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "close"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0, True),
        ([3.0, 4.5], [3.0, 4.0], 0.1, True),  # 0.5 of 5
        ([3.0, 4.5], [3.0, 4.0], 0.099, False),
        ([3.0, 3.5], [3.0, 4.0], 0.1, True),
        ([0.0, 0.0], [3.0, 4.0], 1.0, True),
        ([6.0, 8.0], [3.0, 4.0], 0.9, False),
        ([3.0, float("nan")], [3.0, 4.0], 1.0, False),
        ([float("inf"), 4.0], [float("inf"), 4.0], 1.0, False),
    ],
)
def test_close_is_a_part_of_the_second_ones_norm(got, want, tolerance, close):
    assert _close(torch.tensor(got), torch.tensor(want), tolerance) is close


@pytest.mark.parametrize(("got", "want"), [(1.0, math.inf), (math.inf, 1.0), (math.nan, 1.0), (math.inf, math.inf)])
def test_nothing_is_close_to_what_is_not_finite(got, want):
    assert not _close(torch.tensor([0.0, got]), torch.tensor([0.0, want]), 1e-3)
