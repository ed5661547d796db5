"""Rewards that read tokens through their own embedding table: replay against the unrolled graph."""

from functools import partial

import pytest
import torch
from conftest import VOCAB, ToyReward, make_backbone, make_prompts, tiny_gpt2

import grade.gradients.unrolled as unrolled_module
from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.methods import POLICY_GRADIENTS
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph, replay
from grade.gradients.rollout import sample
from grade.gradients.unrolled import StepwiseOptions, checkpointed, gathered_embedding, stepwise, unrolled
from grade.models.head import EmbeddingTable, support_logits
from grade.rewards.base import EmbeddingReward, Reward
from grade.rewards.rewards import Rewards

T = 6


def own_table(scope, dim=11, seed=5):
    """A toy reward with a table of another width, not a multiple of the policy's, and scaled."""
    weight = torch.randn(VOCAB, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return EmbeddingReward(ToyReward(dim, seed=seed), scope, reads=EmbeddingTable(weight, 0.7))


def policy(tied=True):
    """GPT-2: its layer norms are float64 in a float64 model, Llama's are float32 and leave 1e-7."""
    gpt2 = tiny_gpt2()
    gpt2.tie_word_embeddings = tied
    return make_backbone(gpt2, target_modules=["c_attn"])


def rewards(kind, scope="prompt_and_completion"):
    own = own_table(scope)
    parts = [EmbeddingReward(ToyReward(16), scope), own, own_table(scope, 7, 6)]
    return own if kind == "own" else Rewards(parts, [0.5, -1.5, 2.0], scope=scope, dtype=torch.float64)


def config(**changes):
    return RelaxationConfig(**{**dict(estimator="ste", gumbel_topk=7, max_new_tokens=T, tau=0.9), **changes})


def gradient(engine, backbone, objective, cfg, seed=4):
    backbone.zero_grad(set_to_none=True)
    step = engine(backbone, make_prompts(), objective, cfg, torch.Generator().manual_seed(seed))
    return step, torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()])


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scope", ["prompt_and_completion", "completion"])
@pytest.mark.parametrize("kind", ["own", "sum"])
def test_replay_and_checkpointed_equal_the_unrolled_graph(estimator, tied, scope, kind):
    """float64; rounding leaves about 1e-13."""
    backbone = policy(tied)
    assert (backbone.head.weight is backbone.embedding_weight) == tied
    objective, cfg = Objective(rewards(kind, scope), 0.3, scope), config(estimator=estimator)
    want, want_grad = gradient(unrolled, backbone, objective, cfg)
    assert (want.completion_mask == 0).any(), "the case must contain an early end of sequence"
    for engine in (partial(replay, hops=T - 1), checkpointed):
        got, got_grad = gradient(engine, backbone, objective, cfg)
        torch.testing.assert_close(got.reward, want.reward)
        torch.testing.assert_close(got.loss, want.loss)
        assert relative_error(got_grad, want_grad) <= 1e-8
    assert relative_error(gradient(partial(replay, hops=0), backbone, objective, cfg)[1], want_grad) > 1e-3


def test_the_unrolled_graph_itself_matches_finite_differences():
    """Soft tokens, fixed noise, no KL: a smooth function."""
    backbone = policy()
    objective, cfg = Objective(rewards("sum"), 0.0), config(estimator="gumbel", gumbel_topk=0)
    _, grad = gradient(unrolled, backbone, objective, cfg)
    direction = torch.randn(grad.shape, dtype=grad.dtype, generator=torch.Generator().manual_seed(1))

    def loss(eps):
        offset = 0
        with torch.no_grad():
            for p in backbone.trainable_parameters():
                p.add_(eps * direction[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        return gradient(unrolled, backbone, objective, cfg)[0].loss.item()

    eps = 1e-6
    numeric, analytic = (loss(eps) - loss(-2 * eps)) / (2 * eps), (grad @ direction).item()
    assert abs(numeric - analytic) / abs(analytic) < 1e-5  # truncation eps^2, rounding 1e-16 / eps


@pytest.mark.parametrize("options", [StepwiseOptions(reward_embedding=k) for k in ("dense", "gathered", "bagged")])
def test_every_way_to_embed_for_the_reward_gives_the_same_gradient(options):
    backbone, objective = policy(), Objective(rewards("own"), 0.3)
    want = gradient(unrolled, backbone, objective, config())[1]
    assert relative_error(gradient(partial(stepwise, options=options), backbone, objective, config())[1], want) <= 1e-8


@pytest.mark.parametrize("estimator", ["gumbel_rao", "reinmax", "st"])
def test_redrawing_estimators_take_them_too(estimator):
    backbone, cfg = policy(), config(estimator=estimator)
    steps = [gradient(partial(replay, hops=2), backbone, Objective(rewards(k), 0.0), cfg) for k in ("own", "sum")]
    assert all(torch.isfinite(grad).all() and grad.norm() > 0 for _, grad in steps)
    # The same table as the policy's: the way through k must give what the way through r gives.
    heads = ToyReward(16)
    table = EmbeddingTable(backbone.embedding_weight.detach(), backbone.embedding_scale)
    same = EmbeddingReward(ToyReward(16), reads=table)
    want = gradient(partial(replay, hops=T), backbone, Objective(heads, 0.2), cfg)[1]
    assert relative_error(gradient(partial(replay, hops=T), backbone, Objective(same, 0.2), cfg)[1], want) <= 1e-8


def test_a_reward_with_its_own_table_adds_nothing_to_r():
    backbone = policy()
    rollout = sample(backbone, make_prompts(), config(), torch.Generator().manual_seed(4))
    _, r, k = ReplayGraph(backbone, rollout).reward_adjoints(Objective(rewards("own")), config())
    assert not r.any() and k.any()
    _, r, k = ReplayGraph(backbone, rollout).reward_adjoints(Objective(ToyReward(16)), config())
    assert r.any() and k is None


class OnlyText(Reward):
    name, no_gradient = "length", "a function of text, which has no gradient"

    def score(self, policy, prompts, ids, mask):
        return mask.sum(1).double()


@pytest.mark.parametrize("engine", [replay, unrolled, checkpointed])
@pytest.mark.parametrize("reward", [OnlyText(), Rewards([EmbeddingReward(ToyReward(16)), OnlyText()])])
def test_relaxed_engines_refuse_a_reward_without_gradient_by_name(engine, reward):
    with pytest.raises(InputError, match="reward 'length': got 'a function of text.*for ste") as error:
        gradient(engine, policy(), Objective(reward), config())
    assert all(name in str(error.value) for name in POLICY_GRADIENTS) and "\n" not in str(error.value)


def test_the_score_of_any_reward_is_asked_of_the_reward():
    backbone, prompts = policy(), make_prompts()
    ids, mask = prompts.ids, prompts.mask
    assert Objective(OnlyText()).score(backbone, prompts, ids, mask).tolist() == mask.sum(1).tolist()


def test_a_reward_made_for_another_scope_is_a_programmers_mistake():
    reward = OnlyText()
    reward.scope = "completion"
    with pytest.raises(ValueError, match="scope"):
        Objective(reward)
    Objective(reward, scope="completion")


def test_rows_that_are_gathered_are_weighed_and_summed_whatever_stands_before_them():
    table = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]], dtype=torch.float64)
    support, weights = torch.tensor([[0, 2], [1, 1]]), torch.tensor([[0.25, 0.5], [1.0, 2.0]])
    want = torch.tensor([[3.75, 6.0], [9.0, 15.0]], dtype=torch.float64)
    for shape in ((2, 2), (2, 1, 2), (1, 2, 1, 2)):
        got = gathered_embedding(table, support.view(shape), weights.view(shape))
        assert torch.equal(got, want.view(*shape[:-1], 2))


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("positions", ["last", "all"])
def test_logits_at_the_support_alone_are_for_the_compact_graph(monkeypatch, compact, positions):
    calls = []
    monkeypatch.setattr(unrolled_module, "support_logits", lambda *a: calls.append(a) or support_logits(*a))
    options = StepwiseOptions(compact=compact, head_positions=positions)
    gradient(partial(stepwise, options=options), policy(), Objective(rewards("own"), 0.3), config())
    assert bool(calls) == (compact and positions == "last")
