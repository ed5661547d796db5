"""Sampling: exact, seedable, and equal to what a full pass computes."""

import pytest
import torch
from conftest import EOS, make_backbone, make_prompts
from scipy import stats

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.rollout import sample
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate, is_eos


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_hard_samples_follow_the_policy(backbone):
    """Chi-squared on the first token of 6,000 copies of one prompt, straight-through with K = 3 of 23 tokens."""
    n = 6000
    one = make_prompts(1)
    prompts = PromptBatch(one.ids.expand(n, -1), one.mask.expand(n, -1))
    config = RelaxationConfig(gumbel_topk=3, max_new_tokens=1)
    counts = torch.bincount(sample(backbone, prompts, config, generator()).completion_ids[:, 0], minlength=23)
    p = backbone.head(backbone.hidden(backbone.embed(one.ids), one.mask))[0, -1].softmax(-1).detach()
    assert (p * n > 5).all(), "the usual rule for a chi-squared cell"
    observed, expected = counts.double(), p * n
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3  # the seed is fixed


def test_mask_ends_after_the_first_end_of_sequence(backbone):
    prompts = make_prompts(64)
    rollout = sample(backbone, prompts, RelaxationConfig(gumbel_topk=0, max_new_tokens=6), generator())
    ended = 0
    for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True):
        hits = is_eos(ids, tuple(EOS)).nonzero().flatten().tolist()
        length = hits[0] + 1 if hits else 6
        ended += bool(hits)
        assert mask.tolist() == [1] * length + [0] * (6 - length)
    assert ended > 10


def test_straight_through_rollout_and_generate_are_one_sample(backbone):
    prompts = make_prompts(5)
    rollout = sample(backbone, prompts, RelaxationConfig(gumbel_topk=4, max_new_tokens=6), generator(3))
    ids, mask = generate(backbone, prompts, 6, generator(3), stop_early=False)
    assert torch.equal(ids, rollout.completion_ids) and torch.equal(mask, rollout.completion_mask)


def test_greedy_and_early_stop(backbone):
    prompts = make_prompts(3)
    first, _ = generate(backbone, prompts, 6, generator(0), temperature=0)
    again, _ = generate(backbone, prompts, 6, generator(1), temperature=0)
    assert torch.equal(first, again)
    always = make_backbone()
    always.eos_token_ids = tuple(range(23))
    ids, mask = generate(always, prompts, 6, generator())
    assert ids.shape == (3, 1) and mask.all()


def test_a_half_precision_base_is_not_merged():
    backbone = make_backbone(dtype=torch.bfloat16)
    weight = backbone.model.model.layers[0].self_attn.q_proj.get_base_layer().weight
    pointer = weight.data_ptr()
    with torch.no_grad(), backbone.merged():
        assert weight.data_ptr() == pointer


def test_a_sequence_beyond_the_context_is_refused(backbone):
    with pytest.raises(InputError, match="got 65; allowed: at most 64"):
        sample(backbone, make_prompts(1), RelaxationConfig(gumbel_topk=0, max_new_tokens=60), generator())
    with pytest.raises(InputError, match="temperature: got -1"):
        generate(backbone, make_prompts(1), 2, generator(), temperature=-1)
