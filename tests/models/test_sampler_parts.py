"""Samplers by name, checked rows, and the sampler of shared prompts, one function at a time."""

import contextlib
import math

import pytest
import torch
from conftest import EOS, VOCAB, make_backbone, make_prompts

from grade.errors import InputError
from grade.models.prompts import PromptBatch
from grade.models.samplers.continuous import ContinuousBatching
from grade.models.samplers.interface import (
    Mismatch,
    Sampler,
    Samples,
    _checked,
    check_lengths,
    mismatch,
    samples_of,
    seed_of,
    token_rows,
)
from grade.models.samplers.make import known_sampler, make_sampler
from grade.models.samplers.own import OwnSampler
from grade.models.samplers.server import CompletionsServer
from grade.models.samplers.shared import BLOCK, SharedPrompts, draw, shared_decoder


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---- by name ----
def test_each_name_has_its_sampler(tmp_path):
    kinds = {"own": OwnSampler, "shared": SharedPrompts, "transformers": ContinuousBatching}
    for name, kind in kinds.items():
        assert type(make_sampler(name)) is kind and make_sampler(name).name == name == known_sampler(name)
    made = make_sampler("http://a:1/v1")
    assert type(made) is CompletionsServer and made.name == "http://a:1" and made.folder is None
    assert made.client.timeout == CompletionsServer("http://a").client.timeout == 600.0  # ten minutes
    assert make_sampler("http://a:1", 2.5, tmp_path).client.timeout == 2.5
    assert make_sampler("http://a:1", 2.5, str(tmp_path)).folder == tmp_path
    for name in ("mine", "Own", ""):
        with pytest.raises(InputError, match="sampler: got"):
            known_sampler(name)
        with pytest.raises(InputError, match="sampler: got"):
            make_sampler(name)


def test_a_sampler_of_this_process_takes_no_adapter(backbone):
    sampler = Sampler()
    assert sampler.publish(backbone) is None and sampler.use(None) is None and sampler.close() is None
    with pytest.raises(NotImplementedError):
        sampler.sample(backbone, make_prompts(), 1, generator())


# ---- the interface ----
@pytest.mark.parametrize(
    ("most", "least", "message"),
    [
        (0, 0, "max_new_tokens: got 0; allowed: at least 1"),
        (2, -1, "min_new_tokens: got -1; allowed: 0 to max_new_tokens = 2"),
        (2, 3, "min_new_tokens: got 3"),
        (60, 0, "max_prompt_tokens . max_new_tokens: got 65; allowed: at most 64"),
        (1, 0, None), (1, 1, None), (59, 59, None),
    ],
)  # fmt: skip
def test_lengths_at_their_bounds(most, least, message, backbone):
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        check_lengths(backbone, make_prompts(), most, least)


def test_rows_of_tokens_are_without_padding():
    ids = torch.tensor([[0, 5, 0], [7, 0, 9]])
    assert token_rows(PromptBatch(ids, torch.tensor([[0, 1, 1], [1, 1, 1]]))) == [[5, 0], [7, 0, 9]]
    assert token_rows(PromptBatch(ids, torch.tensor([[0, 0, 1], [0, 0, 0]]))) == [[0], []]


def test_a_seed_is_the_generators_next_number_below_two_to_62():
    want = torch.randint(2**62, (2,), generator=generator(3))
    source = generator(3)
    assert [seed_of(source), seed_of(source)] == want.tolist()
    assert max(seed_of(source) for _ in range(200)) > 2**61


A, B, END = 3, 4, EOS[0]
LEAST, MOST = 1, 3


@pytest.mark.parametrize(
    ("ids", "kept"),
    [([A, B, A], 3), ([A, B, END], 3), ([A, END, B], 2), ([A, END], 2), ([0, VOCAB - 1, A], 3), ([A, END, END], 2)],
)
def test_a_completion_ends_with_its_first_end(ids, kept):
    logps = [-1.0, -2, 0.0][: len(ids)]
    assert _checked("x", (ids, logps), VOCAB, set(EOS), MOST, LEAST) == (ids[:kept], logps[:kept])


@pytest.mark.parametrize(
    ("ids", "logps", "message"),
    [
        ([A, B, A], [0.0] * 2, "2 log-probabilities of 3 tokens'; allowed: one of each"),
        ([], [], "got '0 tokens'; allowed: completions of 1 to 3 tokens"),
        ([A] * 4, [0.0] * 4, "got '4 tokens'"),
        ([A, VOCAB, A], [0.0] * 3, f"got {VOCAB}; allowed: token ids .* 0 to {VOCAB - 1}"),
        ([A, -1, A], [0.0] * 3, "got -1"),
        ([A, 3.0, A], [0.0] * 3, "got 3.0"),
        ([A, True, A], [0.0] * 3, "got True"),
        ([A, B, A], [0.0, True, 0.0], "got True; allowed: a finite log-probability"),
        ([A, B, A], [0.0, -math.inf, 0.0], "got -inf"),
        ([A, B, A], [0.0, "1", 0.0], "got '1'"),
        ([END, A, B], [0.0] * 3, "an end-of-sequence after 0 tokens'; allowed: none before 1 tokens"),
        ([A, B], [0.0] * 2, r"a completion that stops after 2 tokens'; allowed: 3 tokens, or .* \(2, 7, 12\)"),
    ],
)
def test_what_the_policy_could_not_have_written(ids, logps, message):
    with pytest.raises(InputError, match=f"sampler x: got .*{message.removeprefix('got ')}"):
        _checked("x", (ids, logps), VOCAB, set(EOS), MOST, LEAST)


def test_a_policy_without_an_end_says_none():
    with pytest.raises(InputError, match=r"of the policy \(none\)"):
        _checked("x", ([A], [0.0]), VOCAB, set(), 2, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rows_become_tensors_of_the_longest(dtype):
    backbone = make_backbone(dtype=dtype)
    samples = samples_of("x", [([A, END], [-1.0, -2.5]), ([B, B, A], [-0.5, -3, 0.0])], backbone, 3, 1)
    assert samples.ids.tolist() == [[A, END, 0], [B, B, A]] and samples.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert samples.logps.tolist() == [[-1.0, -2.5, 0.0], [-0.5, -3.0, 0.0]]
    assert samples.ids.dtype == samples.mask.dtype == torch.long
    assert samples.logps.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert samples_of("x", [([A, END], [-1.0, -2.5])], backbone, 3, 1).ids.shape == (1, 2)


def test_tokens_are_those_of_the_smaller_of_tokenizer_and_table(backbone):
    row = [([VOCAB - 1], [0.0])]
    for tokenizer, allowed in ((None, True), (range(VOCAB + 5), True), (range(VOCAB), True), (range(VOCAB - 1), False)):
        backbone.tokenizer = tokenizer
        refused = pytest.raises(InputError, match=f"0 to {VOCAB - 2}")
        with contextlib.nullcontext() if allowed else refused:
            samples_of("x", row, backbone, 1, 0)


def test_a_mismatch_is_taken_over_valid_tokens_in_float64():
    samples = Samples(torch.zeros(1, 3).long(), torch.tensor([[1, 1, 0]]), torch.tensor([[-1.0, -2.0, -9.0]]))
    found = mismatch(torch.tensor([[-1.5, -1.0, 0.0]]), samples)
    assert found.mean_ratio == pytest.approx((math.exp(-0.5) + math.e) / 2, abs=1e-15)
    assert found.largest_difference == 1.0
    found.check(1.0, "x")  # at the bound
    with pytest.raises(InputError, match="got '1 nats at one token, mean ratio 1.66'.*sampler_max_difference = 0.999 "):
        found.check(0.999, "x")
    Mismatch(float("nan"), 0.5).check(0.5, "x")


# ---- our own, prompts shared ----
def test_prompts_that_differ_by_padding_alone_are_not_one(backbone):
    """A padded place may hold any id, and an id 0 may be a token."""
    ids = torch.tensor([[0, 5, 6], [9, 5, 6], [0, 5, 6], [0, 5, 6], [0, 5, 7]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]])
    read = []
    decode = backbone.decode
    backbone.decode = lambda embeds, *rest: (read.append(len(embeds)), decode(embeds, *rest))[1]
    state = shared_decoder(backbone, PromptBatch(ids, mask))
    assert read == [3] and torch.equal(state.mask, mask) and len(state.last) == 5
    for row in range(5):
        alone = shared_decoder(backbone, PromptBatch(ids[row : row + 1], mask[row : row + 1]))
        torch.testing.assert_close(state.last[row : row + 1], alone.last)
    embeds = backbone.embed(torch.tensor([3, 4, 5, 6, 8]))
    state.advance(embeds)
    for row in (1, 3, 4):
        alone = shared_decoder(backbone, PromptBatch(ids[row : row + 1], mask[row : row + 1]))
        alone.advance(embeds[row : row + 1])
        torch.testing.assert_close(state.last[row : row + 1], alone.last)


def test_different_prompts_are_all_read(backbone):
    prompts = make_prompts()
    state = shared_decoder(backbone, prompts)
    assert state.mask is not None and len(state.last) == len(prompts)


class Uniform:
    """In place of torch.rand: given numbers."""

    def __init__(self, monkeypatch, values):
        self.values = torch.tensor(values, dtype=torch.float64).unsqueeze(1)
        monkeypatch.setattr(torch, "rand", self)

    def __call__(self, shape, generator, dtype, device):
        assert tuple(shape) == tuple(self.values.shape) and dtype == torch.float64
        return self.values


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_u(monkeypatch):
    logits = torch.tensor([5.0, -torch.inf, 5.0, 5.0, 5.0])  # four of one probability, so that sums are exact
    u = [0.0, 0.249, 0.25, 0.499, 0.5, 0.75, 0.999]
    Uniform(monkeypatch, u)
    tokens, logps = draw(logits.expand(len(u), 5), generator())
    assert tokens.tolist() == [0, 0, 2, 2, 3, 4, 4]
    torch.testing.assert_close(logps, torch.full((7,), math.log(0.25)))


@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_a_draw_is_the_inverse_of_the_distribution_across_blocks(vocab, monkeypatch):
    logits = 3 * torch.randn(1, vocab, generator=generator(1), dtype=torch.float64)
    ends = logits[0].softmax(-1).cumsum(-1)
    u = torch.linspace(0, 1, 402, dtype=torch.float64)[:-1]
    u = u[(ends[:, None] - u).abs().amin(0) > 1e-9]  # not where rounding decides
    Uniform(monkeypatch, u.tolist())
    tokens, logps = draw(logits.expand(len(u), vocab), generator())
    assert torch.equal(tokens, torch.searchsorted(ends, u, right=True).clamp(max=vocab - 1))
    torch.testing.assert_close(logps, logits[0].log_softmax(-1)[tokens])
    assert tokens.shape == logps.shape == u.shape and logps.dtype == torch.float64
    assert BLOCK == 256  # a block of a vocabulary of 65,536: the samples of a seed depend on it in rounding alone


def test_the_last_token_is_drawn_also_by_the_largest_u(monkeypatch):
    """Rounding may put u above all sums: still a token, also where the last block is padded."""
    for vocab in (3, BLOCK, BLOCK + 2):
        Uniform(monkeypatch, [1.0])
        tokens, _ = draw(torch.zeros(1, vocab), generator())
        assert tokens.tolist() == [vocab - 1]


def test_completions_of_shared_prompts_end_and_stop_early(backbone):
    """The head is replaced: after two tokens an end is all there is."""
    step, prompts = [], make_prompts(2).repeat(2)

    class Head:
        weight = backbone.head.weight

        def __call__(self, hidden):
            logits = torch.full((len(hidden), VOCAB), -torch.inf)
            logits[:, A] = 0.0
            if len(step) == 2:
                logits[:, A], logits[:, END] = -torch.inf, 0.0
            step.append(0)
            return logits

    backbone.head = Head()
    samples = make_sampler("shared").sample(backbone, prompts, 9, generator())
    assert samples.ids.tolist() == [[A, A, END]] * 4 and samples.mask.tolist() == [[1, 1, 1]] * 4
    assert samples.logps.tolist() == [[0.0] * 3] * 4 and samples.mask.dtype == torch.long and len(step) == 3


def test_samples_of_shared_prompts_are_those_of_the_adapter_and_need_no_gradient(backbone):
    phases = []
    backbone.phase = lambda name: phases.append(name) or contextlib.nullcontext()
    samples = make_sampler("shared").sample(backbone, make_prompts(), 3, generator())
    assert "rollout" in phases and not samples.logps.requires_grad
    dead = samples.mask == 0
    assert (samples.logps[dead] == 0).all() and (samples.logps[~dead] < 0).all()
