"""Sampling: exact, seedable, and equal to what a full pass computes."""

import pytest
import torch
from conftest import generator, make_backbone, make_prompts

from grade.gradients.estimators import RelaxationConfig
from grade.gradients.rollout import sample
from grade.models.sampling import generate


@pytest.mark.parametrize("least", [0, 3])
def test_straight_through_rollout_and_generate_are_one_sample(backbone, least):
    prompts = make_prompts(5)
    config = RelaxationConfig(gumbel_topk=0, max_new_tokens=6, min_new_tokens=least)
    rollout = sample(backbone, prompts, config, generator(3))
    ids, mask = generate(backbone, prompts, 6, generator(3), min_new_tokens=least, stop_early=False)
    assert torch.equal(ids, rollout.completion_ids) and torch.equal(mask, rollout.completion_mask)


def test_a_half_precision_base_is_not_merged():
    backbone = make_backbone(dtype=torch.bfloat16)
    weight = backbone.model.model.layers[0].self_attn.q_proj.get_base_layer().weight
    pointer = weight.data_ptr()
    with torch.no_grad(), backbone.merged():
        assert weight.data_ptr() == pointer
