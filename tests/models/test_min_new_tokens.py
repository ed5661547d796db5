"""End-of-sequence is forbidden at the first ``min_new_tokens`` steps and at no later one, drawn or scored."""

import pytest
import torch
from conftest import EOS, make_prompts

from grade.errors import InputError
from grade.models.sampling import forbid_eos, generate
from grade.models.scoring import score


@pytest.mark.parametrize("least", [0, 1, 3])
def test_exactly_the_first_steps_are_masked(least):
    logits = torch.zeros(5, 23)
    masked = forbid_eos(logits, None, torch.arange(5)[:, None], least, tuple(EOS))
    ends = torch.isin(torch.arange(23), torch.tensor(EOS))
    assert torch.equal(masked.isneginf(), (torch.arange(5) < least)[:, None] & ends)
    assert torch.equal(masked[:, ~ends], logits[:, ~ends])
    some = torch.tensor([EOS[0], 3])  # two candidates, named by their ids
    assert forbid_eos(logits[:, :2], some, 0, least, tuple(EOS)).isneginf().any(0).tolist() == [least > 0, False]
    assert not forbid_eos(logits, None, 0, least, ()).isneginf().any()


@pytest.mark.parametrize("least", [1, 3])
def test_a_completion_may_end_right_after_the_least_length(backbone, least):
    def ending(shape):
        noise = torch.zeros(shape)
        noise[:, EOS] = 1e6  # as soon as it is allowed, the end is drawn
        return noise

    prompts = make_prompts()
    ids, mask = generate(backbone, prompts, 8, ending, min_new_tokens=least)
    assert mask.sum(1).tolist() == [least + 1] * 3  # with the end itself
    assert torch.isin(ids[:, least], torch.tensor(EOS)).all()
    logps = score(backbone, prompts, ids, mask, min_new_tokens=least).logps
    free = score(backbone, prompts, ids, mask).logps
    assert torch.equal(logps[:, least], free[:, least])  # nothing is forbidden there
    assert (logps[:, :least] > free[:, :least]).all()  # the others share what the end would have had
    with pytest.raises(InputError, match=f"at least min_new_tokens = {least + 1}"):
        score(backbone, prompts, ids, mask, min_new_tokens=least + 1)


@pytest.mark.parametrize("least", [1, 3])
def test_scores_of_later_tokens_are_those_without_a_least_length(backbone, least):
    prompts = make_prompts()
    ids = torch.randint(13, 23, (3, 6), generator=torch.Generator().manual_seed(0))  # none of them ends a completion
    logps, free = (score(backbone, prompts, ids, torch.ones_like(ids), min_new_tokens=n).logps for n in (least, 0))
    assert torch.equal(logps[:, least:], free[:, least:]) and (logps[:, :least] > free[:, :least]).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_without_a_distribution_has_no_scores(backbone, temperature):
    ids = torch.full((3, 2), 13)
    with pytest.raises(InputError, match="temperature"):
        score(backbone, make_prompts(), ids, torch.ones_like(ids), temperature=temperature)
