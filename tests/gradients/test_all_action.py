"""Expectations over the whole vocabulary against dense formulas; straight-through without noise as their gradient."""

import pytest
import torch
from conftest import EOS, VOCAB, ToyReward, make_backbone, make_prompts, tiny_gpt2
from models.test_head import HEADS, D, N, V, make_head

from grade.gradients.all_action import embedding_values, expected_values
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph, replay
from grade.gradients.rollout import sample
from grade.models import head as head_module
from grade.models.parameters import flatten


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(head_module, "CHUNK_ROWS", 4)


@pytest.mark.parametrize("forbidden", [(), (3, 0, 129)])
@pytest.mark.parametrize("shape", [(N, V), (1, V), (V,)], ids=str)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_expectations_and_gradients_against_dense_logits(options, shape, forbidden):
    head, h, s, weight = make_head(**options), randn(N, D, seed=3).requires_grad_(), randn(*shape, seed=4), randn(N)
    where = torch.arange(N) % 3 != 0
    logits = head(h)
    if forbidden:
        out = torch.zeros(N, V, dtype=torch.bool)
        out[:, list(forbidden)] = where.unsqueeze(1)
        logits = logits.masked_fill(out, -torch.inf)
    want = (logits.softmax(-1) * s).sum(-1)
    got = expected_values(head, h, lambda rows: s[rows] if shape == (N, V) else s, forbidden, where)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, h, weight)[0], torch.autograd.grad(want, h, weight)[0])
    assert not expected_values(head, h.detach(), lambda rows: s[rows] if shape == (N, V) else s).requires_grad


def test_a_half_precision_model_has_float32_expectations():
    """bfloat16 products of D = 5 terms are off by 2^-8 of their largest; a softmax in bfloat16 would be off by more."""
    head, h = make_head(dtype=torch.bfloat16), randn(N, D, seed=3, dtype=torch.bfloat16)
    table, u = randn(V, D, seed=5, dtype=torch.bfloat16), randn(N, D, seed=6)
    values = embedding_values(table, 0.5, u)
    assert values(torch.arange(2)).dtype == torch.float32
    got = expected_values(head, h, values)
    p, s = head(h).softmax(-1).double(), values(torch.arange(N)).double()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), (p * s).sum(-1))  # float32 rounding only: same logits, same values


class Linear(ToyReward):
    """Linear in the embeddings, with a weight for each position."""

    def forward(self, embeds, mask):
        position = torch.linspace(0.5, 1.5, embeds.shape[1], dtype=embeds.dtype)
        return (embeds @ self.w * position * mask).sum(1)


def gradient(backbone, prompts, objective, config, seed=0, **options):
    backbone.zero_grad(set_to_none=True)
    replay(backbone, prompts, objective, config, torch.Generator().manual_seed(seed), **options)
    return flatten(p.grad for p in backbone.trainable_parameters())


def gpt2():
    """Its layer norms are float64 in a float64 model, Llama's are float32."""
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])


@pytest.mark.parametrize("min_new_tokens", [0, 3])
def test_a_linear_reward_without_hops_has_the_all_action_gradient(min_new_tokens):
    """The critic is the reward itself, read again with each token of the vocabulary in each place."""
    backbone, prompts, objective, length = gpt2(), make_prompts(), Objective(Linear(16), 0.0), 5
    config = RelaxationConfig(estimator="st", max_new_tokens=length, min_new_tokens=min_new_tokens)
    rollout = sample(backbone, prompts, config, torch.Generator().manual_seed(6))
    ids, mask = rollout.completion_ids, rollout.completion_mask
    assert (mask == 0).any()
    logits = backbone.head(ReplayGraph(backbone, rollout).h)
    early = torch.arange(length) < min_new_tokens
    logits = logits.masked_fill(early.view(-1, 1) & torch.isin(torch.arange(VOCAB), torch.tensor(EOS)), -torch.inf)
    total = 0
    for t in range(length):
        s = []
        for v in range(VOCAB):
            other = ids.clone()
            other[:, t] = v
            s.append(objective.reward(backbone.embed(prompts.ids), prompts, backbone.embed(other), mask).detach())
        total = total + (logits[:, t].softmax(-1) * torch.stack(s, 1)).sum(1) * mask[:, t]
    want = flatten(torch.autograd.grad(-total.mean(), backbone.trainable_parameters()))
    got = gradient(backbone, prompts, objective, config, rollout=rollout, hops=0)
    assert (got - want).norm() <= 1e-9 * want.norm()
