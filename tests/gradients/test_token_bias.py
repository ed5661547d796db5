"""Gradients of a policy with a token bias, frozen or trained: engine against engine, methods against enumeration."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import VOCAB, ToyReward, generator, gradient, make_backbone, make_prompts, tiny_gpt2
from gradients.test_policy_gradient import T, exact_gradient, expected_gradient, policy, without_whitening

from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph, replay
from grade.gradients.rollout import sample
from grade.gradients.unrolled import checkpointed, unrolled
from grade.models.head import EmbeddingTable
from grade.plugins import ESTIMATORS
from grade.rewards.base import EmbeddingReward
from grade.rewards.rewards import Rewards


def biased(trainable, softcap=None, **settings):
    """GPT-2, whose layer norms are float64 in a float64 model."""
    backbone = make_backbone(tiny_gpt2(**settings), target_modules=["c_attn"])
    backbone.ref_head = replace(backbone.ref_head, softcap=softcap, scale=0.8, temperature=0.7)
    values = torch.randn(backbone.vocab_size, dtype=torch.float64, generator=generator(3))
    backbone.set_token_bias(values, trainable)
    return backbone


def rewards():
    """One on the policy's table, one on a table of its own."""
    table = torch.randn(VOCAB, 10, dtype=torch.float64, generator=generator(9))
    own = EmbeddingReward(ToyReward(10), "prompt_and_completion", "own", EmbeddingTable(table, 1.5))
    return Rewards([EmbeddingReward(ToyReward(16), "prompt_and_completion"), own], dtype=torch.float64)


def run(engine, backbone, config, objective):
    backbone.zero_grad(set_to_none=True)
    step = engine(backbone, make_prompts(), objective, config, generator(4), 0.5)
    return step, gradient(backbone)


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
@pytest.mark.parametrize("topk", [7, 0])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("trainable", [False, True])
def test_engines_agree_with_the_unrolled_graph(estimator, topk, softcap, trainable):
    backbone, objective = biased(trainable, softcap), Objective(rewards(), beta=0.3)
    config = RelaxationConfig(estimator=estimator, gumbel_topk=topk, max_new_tokens=6, min_new_tokens=2, tau=0.9)
    want, want_grad = run(unrolled, backbone, config, objective)
    part = VOCAB if trainable else len(want_grad)
    assert want_grad[-part:].norm() > 1e-3
    for engine in (checkpointed, partial(replay, hops=6)):
        got, grad = run(engine, backbone, config, objective)
        assert torch.equal(got.completion_ids * got.completion_mask, want.completion_ids * want.completion_mask)
        torch.testing.assert_close((got.reward, got.kl, got.loss), (want.reward, want.kl, want.loss))
        assert (grad - want_grad).norm() <= 1e-10 * want_grad.norm()
        assert (grad - want_grad)[-part:].norm() <= 1e-10 * want_grad[-part:].norm()


def test_a_smooth_loss_has_the_biass_gradient_of_finite_differences():
    """beta = 0, as KL's reference reads the unperturbed tokens; soft tokens, fixed noise."""
    backbone, objective = biased(True, 1.5), Objective(ToyReward(16), beta=0.0)
    config = RelaxationConfig(estimator="gumbel", gumbel_topk=0, max_new_tokens=6, tau=0.9)
    grad = run(partial(replay, hops=6), backbone, config, objective)[1][-VOCAB:]
    direction, start, losses = torch.randn(VOCAB, dtype=torch.float64), backbone.token_bias.detach().clone(), []
    for eps in (1e-6, -1e-6):
        backbone.set_token_bias(start + eps * direction)
        losses.append(run(replay, backbone, config, objective)[0].loss)
    numeric = 0.5 * (losses[0] - losses[1]) / 2e-6  # the gradient's factor is 0.5
    torch.testing.assert_close(numeric, grad @ direction, rtol=1e-5, atol=0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_bias_is_moved_as_further_columns_of_the_hidden_states_are(estimator):
    """``h W^T + b = [h, b] [W, 1]^T``: the adjoint of those columns, summed over positions, is that of b."""
    backbone, prompts, objective = biased(True), make_prompts(), Objective(rewards(), beta=0.0)
    backbone.ref_head = replace(backbone.ref_head, scale=1.0)
    config = RelaxationConfig(estimator=estimator, gumbel_topk=7, max_new_tokens=4, min_new_tokens=1, tau=0.9)
    rollout, bias, head = sample(backbone, prompts, config, generator()), backbone.token_bias, backbone.ref_head
    adjoints = []
    for columns in (False, True):
        graph = ReplayGraph(backbone, rollout)
        if columns:
            graph.h = torch.cat([graph.h, bias.detach().expand(*graph.h.shape[:2], -1)], -1)
            backbone.set_token_bias(None)
            backbone.ref_head = replace(head, weight=torch.cat([head.weight, torch.eye(VOCAB).double()], 1))
        _, r, k = graph.reward(objective, config)
        adjoints.append(graph.adjoint(r, k, graph.pullback(rollout, config), 3)[0])
    (hidden, of_bias), (both,) = adjoints
    torch.testing.assert_close(hidden, both[..., :16])
    torch.testing.assert_close(of_bias, both[..., 16:].sum((0, 1)))
    assert of_bias.norm() > 1e-4


def test_replay_trains_a_bias_without_an_adapter():
    backbone = biased(True)
    alone = type(backbone)(backbone.peft.unload())
    alone.ref_head = backbone.ref_head
    alone.set_token_bias(backbone.token_bias, True)
    config, objective = RelaxationConfig(gumbel_topk=7, max_new_tokens=6), Objective(ToyReward(16), beta=0.3)
    grads = [run(engine, alone, config, objective)[1] for engine in (unrolled, checkpointed, partial(replay, hops=6))]
    assert len(grads[0]) == VOCAB
    for grad in grads[1:]:
        assert (grad - grads[0]).norm() <= 1e-10 * grads[0].norm()


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize(
    ("method", "group", "least"), [("reinforce", 1, 1), ("remax", 1, 0), ("rloo", 2, 0), ("grpo", 2, 1), ("ppo", 1, T)]
)
def test_a_policy_gradients_expectation_is_the_gradient_of_the_objective(method, group, least, trainable, monkeypatch):
    """Of every completion, with its probability; naive autograd on dense logits gives the other side."""
    backbone = policy()
    backbone.set_token_bias(torch.tensor([0.5, -0.4, 0.3]), trainable)
    options = dict(passes_per_step=1) if method == "ppo" else {}
    if method == "ppo":
        without_whitening(monkeypatch)
    want = exact_gradient(backbone, least=least)
    assert want[-3:].norm() > 1e-3
    torch.testing.assert_close(expected_gradient(method, backbone, group, least, **options), want)
