"""Hidden states of completions under the frozen base, and their means, one unpadded row at a time."""

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_gpt2
from torch.nn import functional as F

from grade.models.sampling import generate
from grade.models.scoring import completion_states, pool, predicting_hidden, token_kl

LENGTH = 5


@pytest.fixture(scope="module")
def policy():
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])


@pytest.fixture(scope="module")
def sampled(policy):
    prompts = make_prompts()
    ids, mask = generate(policy, prompts, LENGTH, torch.Generator().manual_seed(3), stop_early=False)
    return prompts, ids, torch.cumprod(mask, 1) * torch.tensor([[1] * 5, [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])


def test_states_are_the_bases_without_adapter_padding_or_other_rows(policy, sampled):
    prompts, ids, mask = sampled
    found = completion_states(policy, prompts, ids, mask, (0, 1, 2))
    for row in range(len(ids)):
        whole = torch.cat([prompts.ids[row][prompts.mask[row].bool()], ids[row][mask[row].bool()]])[None]
        first, real = int(prompts.mask[row].sum()), int(mask[row].sum())
        with torch.no_grad(), policy.reference():
            layers = policy.decoder(input_ids=whole, output_hidden_states=True)
        # The state before a token predicts it.
        torch.testing.assert_close(found.predicting[row, :real], layers.last_hidden_state[0, first - 1 : -1])
        for depth, pooled in found.pooled.items():
            states = layers.hidden_states[depth][0, first:]
            torch.testing.assert_close(pooled[row], F.layer_norm(states, states.shape[-1:]).mean(0))
    assert found.predicting.shape == (3, LENGTH, policy.hidden_size) and not found.predicting.requires_grad


def test_states_need_no_gradient_also_where_the_base_is_trained(policy, sampled):
    weight = policy.embedding_weight.requires_grad_(True)
    try:
        found = completion_states(policy, *sampled, (0,))
        plain = completion_states(policy, *sampled)
    finally:
        weight.requires_grad_(False)
    assert not found.predicting.requires_grad and not found.pooled[0].requires_grad
    assert plain.pooled == {} and torch.equal(plain.predicting, found.predicting)


def test_a_mean_is_over_the_valid_positions_of_normalised_states():
    states, mask = torch.tensor([[[1.0, 3.0], [7.0, 5.0], [1e6, 0.0]]]), torch.tensor([[1, 1, 0]])
    torch.testing.assert_close(pool(states, mask), torch.tensor([[0.0, 0.0]]), atol=1e-4, rtol=0)  # (-1, 1) and (1, -1)
    torch.testing.assert_close(pool(states, torch.tensor([[1, 0, 0]])), torch.tensor([[-1.0, 1.0]]), atol=1e-4, rtol=0)


def test_the_kl_of_padding_is_zero(policy, sampled):
    prompts, ids, mask = sampled
    hidden = predicting_hidden(policy, prompts, ids)
    with torch.no_grad(), policy.reference():
        reference = predicting_hidden(policy, prompts, ids)
    kl = token_kl(policy, hidden, reference, mask)
    assert (kl[mask == 0] == 0).all() and (kl[mask == 1] > 0).all() and kl.isfinite().all()
