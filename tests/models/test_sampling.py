"""Sampling: exact samples of the policy, where a completion may end, and the cache."""

import math
from functools import partial

import pytest
import torch
from conftest import EOS, VOCAB, generator, make_backbone, make_prompts, tiny_gpt2
from transformers.cache_utils import DynamicLayer

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.rollout import sample
from grade.models.base import KeysValues
from grade.models.batch import PromptBatch
from grade.models.noise import gumbel_noise
from grade.models.sampling import generate
from grade.models.scoring import completion_logps, predicting_hidden


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_token_is_where_its_number_falls_among_the_cumulative_probabilities(backbone, temperature):
    prompts, shape = make_prompts(), (3, 4)
    ids, mask = generate(backbone, prompts, 4, generator(), temperature, stop_early=False)
    numbers = torch.rand(shape, generator=generator(), dtype=torch.float64)
    with torch.no_grad():
        logits = backbone.head(predicting_hidden(backbone, prompts, ids))
    ends = (logits / temperature).softmax(-1).cumsum(-1)
    expected = torch.searchsorted(ends, numbers.unsqueeze(-1), right=True).squeeze(-1)
    assert torch.equal(ids, expected) and ids.dtype == mask.dtype == torch.int64


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_with_noise_a_token_is_the_largest_of_logits_over_temperature_plus_it(backbone, temperature):
    prompts, draws, source = make_prompts(), [], generator()

    def noise(shape):
        draws.append(gumbel_noise(shape, source))
        return draws[-1]

    ids, _ = generate(backbone, prompts, 4, noise, temperature, stop_early=False)
    with torch.no_grad():
        logits = backbone.head(predicting_hidden(backbone, prompts, ids))
    assert torch.equal(ids, (logits / temperature + torch.stack(draws, 1)).argmax(-1))


def test_policies_that_share_noise_draw_the_same_tokens_as_often_as_they_can():
    """With total variation d two policies agree in at least (1 - d) / (1 + d) of the draws: five standard errors."""
    one, n = make_backbone(), 4000
    prompts, tokens, laws = make_prompts(1).repeat(n), [], []
    for scale in (0.0, 1.0):
        one.set_token_bias(scale * torch.randn(VOCAB, generator=generator(5), dtype=torch.float64))
        tokens.append(generate(one, prompts, 1, partial(gumbel_noise, generator=generator()))[0])
        laws.append(one.head(predicting_hidden(one, prompts[:1], tokens[0][:1])).detach().softmax(-1).flatten())
    d = float((laws[0] - laws[1]).abs().sum() / 2)
    least = (1 - d) / (1 + d)
    assert float((tokens[0] == tokens[1]).double().mean()) >= least - 5 * (least * (1 - least) / n) ** 0.5
    assert d > 0.2


def test_at_temperature_0_a_token_is_the_likeliest(backbone):
    prompts = make_prompts()
    ids, _ = generate(backbone, prompts, 4, generator(), 0.0, stop_early=False)
    with torch.no_grad():
        assert torch.equal(ids, backbone.head(predicting_hidden(backbone, prompts, ids)).argmax(-1))


def test_a_completion_ends_with_its_first_end_of_sequence(backbone):
    prompts = make_prompts()
    ids, mask = generate(backbone, prompts, 30, torch.Generator().manual_seed(1))
    assert ids.shape[1] < 30 and ids.shape[1] == int(mask.sum(1).max())
    for row, real in zip(ids, mask, strict=True):
        ends = torch.isin(row, torch.tensor(EOS)).nonzero().flatten()
        assert int(real.sum()) == int(ends[0]) + 1 and (real.diff() <= 0).all()
    long_ids, long_mask = generate(backbone, prompts, 30, torch.Generator().manual_seed(1), stop_early=False)
    assert long_ids.shape == (3, 30) and torch.equal(long_ids[:, : ids.shape[1]], ids)
    assert torch.equal(long_mask[:, : ids.shape[1]], mask) and not long_mask[:, ids.shape[1] :].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens: got 0; allowed: at least 1"), (dict(temperature=-0.1), "temperature"),
        (dict(temperature=math.inf), "temperature: got inf"), (dict(temperature=math.nan), "temperature"),
        (dict(max_new_tokens=60), "tokens of a prompt and its completion: got 65; allowed: at most 64 "),
    ],
)  # fmt: skip
def test_lengths_and_temperatures_that_do_not_fit(backbone, settings, message):
    with pytest.raises(InputError, match=message):
        generate(backbone, make_prompts(), **{"max_new_tokens": 1} | settings, generator=torch.Generator())


@pytest.mark.parametrize("row", [0, 1, 2])
def test_logits_that_are_not_finite_are_refused(row, backbone):
    class Broken:
        weight, token_bias = backbone.head.weight, None

        def __call__(self, hidden):
            logits = torch.zeros(len(hidden), VOCAB)
            logits[row] = math.nan
            return logits

    backbone.ref_head = Broken()
    with pytest.raises(InputError, match="NaN or infinity for 1 of 3 prompts"):
        generate(backbone, make_prompts(), 2, torch.Generator(), 0.0)


@pytest.mark.parametrize("least", [1, 3])
def test_a_completion_may_end_right_after_the_least_length(backbone, least):
    bias = torch.zeros(VOCAB, dtype=torch.float64)
    bias[EOS] = 50.0  # as soon as it is allowed, the end is drawn
    backbone.set_token_bias(bias)
    prompts = make_prompts()
    ids, mask = generate(backbone, prompts, 8, generator(), min_new_tokens=least)
    assert mask.sum(1).tolist() == [least + 1] * 3  # with the end itself
    assert torch.isin(ids[:, least], torch.tensor(EOS)).all()
    logps = completion_logps(backbone, prompts, ids, mask, min_new_tokens=least)
    free = completion_logps(backbone, prompts, ids, mask)
    assert torch.equal(logps[:, least], free[:, least])  # nothing is forbidden there
    assert (logps[:, :least] > free[:, :least]).all()  # the others share what the end would have had
    with pytest.raises(InputError, match=f"at least min_new_tokens = {least + 1}"):
        completion_logps(backbone, prompts, ids, mask, min_new_tokens=least + 1)


@pytest.mark.parametrize("least", [0, 3])
def test_a_relaxed_rollout_takes_the_largest_of_logits_plus_noise(backbone, least):
    prompts = make_prompts(5)
    config = RelaxationConfig(gumbel_topk=0, max_new_tokens=6, min_new_tokens=least)
    rollout = sample(backbone, prompts, config, generator(3))
    with torch.no_grad():
        logits = backbone.head(predicting_hidden(backbone, prompts, rollout.completion_ids))
    logits[:, :least, EOS] = -torch.inf
    assert torch.equal((logits + rollout.noise).argmax(-1), rollout.completion_ids)


def test_a_half_precision_base_is_not_merged():
    backbone = make_backbone(dtype=torch.bfloat16)
    weight = backbone.model.model.layers[0].self_attn.q_proj.get_base_layer().weight
    pointer = weight.data_ptr()
    with torch.no_grad(), backbone.merged():
        assert weight.data_ptr() == pointer


@torch.no_grad()
@pytest.mark.parametrize(("parts", "rooms"), [((32, 1, 1, 1), 2), ((5, *[1] * 20), 16), ((1, 70, 2), 2)], ids=str)
def test_keys_and_values_are_those_of_transformers_in_place(parts, rooms):
    """With a sixteenth to spare: 32 positions have room for 34; 5 to 15 for no more, 16 for 17, ..., 24 for 25."""
    own, theirs, source, found = KeysValues(), DynamicLayer(), generator(), []
    for length in parts:
        states = [torch.randn(2, 3, length, width, generator=source) for width in (4, 6)]
        found.append(own.update(*states))
        assert all(torch.equal(a, b) for a, b in zip(found[-1], theirs.update(*states), strict=True))
        assert own.get_seq_length() == theirs.get_seq_length()
    assert len({keys.data_ptr() for keys, _ in found}) == rooms  # all are held, so none has another's address


def test_a_cache_may_be_read_with_gradient_and_without_in_turn():
    own, theirs, source = KeysValues(), DynamicLayer(), generator()
    for number, length in enumerate((40, 1, 1, 3, 2)):
        states = [torch.randn(2, 3, length, width, generator=source) for width in (4, 6)]
        with torch.set_grad_enabled(number in (1, 3)):
            assert all(torch.equal(a, b) for a, b in zip(own.update(*states), theirs.update(*states), strict=True))


@pytest.mark.parametrize("make", [make_backbone, lambda: make_backbone(tiny_gpt2(), target_modules=["c_attn"])],
                         ids=["llama", "gpt2"])  # fmt: skip
def test_a_prompt_with_several_completions_is_read_once(make, monkeypatch):
    """And each completion is the one it would have by itself; also of rows that are taken out of their order."""
    backbone, read = make(), []
    decode = type(backbone).decode

    def counted(self, embeds, mask, cache):
        read.append(len(embeds))
        return decode(self, embeds, mask, cache)

    monkeypatch.setattr(type(backbone), "decode", counted)
    prompts = make_prompts(3).repeat(2)[[5, 0, 2, 1, 3]]
    apart = PromptBatch(prompts.ids, prompts.mask)
    shared, alone = (generate(backbone, rows, 6, generator(), stop_early=False)[0] for rows in (prompts, apart))
    assert torch.equal(shared, alone) and shared.unique(dim=0).shape[0] == 5
    assert read == [3, *[5] * 5, 5, *[5] * 5]
