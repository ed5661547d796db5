"""Sampling: exact, seedable, and equal to what a full pass computes."""

import torch
from conftest import EOS, make_backbone, make_prompts

from grade.gradients.estimators import RelaxationConfig
from grade.gradients.rollout import sample
from grade.models.sampling import generate, is_eos


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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
