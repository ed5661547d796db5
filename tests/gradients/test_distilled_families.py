"""Features of completions, and what they say of every token, against dense formulas."""

import pytest
import torch
from conftest import VOCAB, make_backbone, make_prompts, tiny_gpt2

from grade.errors import InputError
from grade.gradients.distilled.families import FAMILIES, make_family
from grade.models.sampling import generate

GROUP, LENGTH = 2, 6
MODELS = {"llama": lambda: make_backbone(), "gpt2": lambda: make_backbone(tiny_gpt2(), target_modules=["c_attn"])}


@pytest.fixture(params=MODELS, scope="module")
def backbone(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def completions(backbone):
    """Two of each of three prompts; some end early."""
    prompts = make_prompts(length=5).repeat(GROUP)
    ids, mask = generate(backbone, prompts, LENGTH, torch.Generator().manual_seed(0), 1.0, 0)
    assert (mask == 0).any() and mask.sum(1).max() == LENGTH
    return ids, mask


def fitted(family, fits=3):
    """Random weights [k, F]."""
    size = VOCAB if family.__class__ is FAMILIES["counts"] else family.backbone.embedding_weight.shape[1]
    return torch.randn(fits, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(family.dtype)


def every_value(family, weights, ids):
    """Values [B, T, V], from positions out of order and a few at a time, as the head's chunks come."""
    order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(2))
    values = family.values(weights, ids)
    table = torch.empty(len(order), VOCAB, dtype=family.dtype)
    for numbers in order.split(4):
        table[numbers] = values(numbers)
    return table.view(*ids.shape, VOCAB)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_distilled_is_the_sum_of_the_tokens_values(backbone, completions, name):
    """Each pair of completions by a fit of its own; 0 where masked, whatever stands there."""
    family, (ids, mask) = make_family(name, backbone), completions
    weights, rows = fitted(family), family.rows(ids, mask)
    got = family.token_values(weights, ids, mask)
    want = torch.stack([family.predict(weights[b // GROUP], rows[b : b + 1])[0] for b in range(len(rows))])
    torch.testing.assert_close(got.sum(1), want)
    dense = every_value(family, weights, ids).gather(2, ids.unsqueeze(2)).squeeze(2) * mask
    torch.testing.assert_close(got, dense)
    other = torch.where(mask.bool(), ids, (ids + 3) % VOCAB)
    assert torch.equal(family.rows(other, mask), rows)
    assert torch.equal(family.token_values(weights, other, mask), got)


def test_features_by_hand(backbone):
    """Completion 5 6 5, cut after two tokens in the second row."""
    ids, mask = torch.tensor([[5, 6, 5]] * 2), torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert make_family("counts", backbone).rows(ids, mask).tolist() == [[5, 6, 5], [5, 6, -1]]
    e = backbone.embed(torch.tensor([5, 6])).double()
    want = torch.stack([2 * e[0] + e[1], e[0] + e[1]])
    torch.testing.assert_close(make_family("bag", backbone).rows(ids, mask), want)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_it_likes_is_its_values(backbone, completions, name):
    family, (ids, _) = make_family(name, backbone), completions
    weights = fitted(family, 1)
    torch.testing.assert_close(family.typical(weights).expand(*ids.shape, VOCAB), every_value(family, weights, ids))


def test_a_family_that_there_is_not(backbone):
    with pytest.raises(InputError, match="distil_families: got 'bags'; allowed: 'counts' or 'bag'"):
        make_family("bags", backbone)
