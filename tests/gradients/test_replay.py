"""Three engines, one gradient."""

import gc
import weakref
from functools import partial

import pytest
import torch
from conftest import EOS, ToyReward, make_backbone, make_prompts, tiny_gpt2

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig
from grade.gradients.objective import Objective
from grade.gradients.replay import ReplayGraph, replay
from grade.gradients.rollout import sample
from grade.gradients.straight_through import redrawn
from grade.gradients.unrolled import StepwiseOptions, checkpointed, stepwise, unrolled
from grade.models.head import EmbeddingTable
from grade.models.scoring import completion_logps
from grade.rewards.base import EmbeddingReward
from grade.rewards.rewards import Rewards

T = 6


def gradient(engine, backbone, prompts, objective, config, seed=0, **kwargs):
    backbone.zero_grad(set_to_none=True)
    step = engine(backbone, prompts, objective, config, torch.Generator().manual_seed(seed), **kwargs)
    return step, torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()])


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


def config(**changes):
    return RelaxationConfig(**{**dict(estimator="ste", gumbel_topk=7, max_new_tokens=T, tau=0.9), **changes})


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
@pytest.mark.parametrize("support", ["top_k", "perturbed_top_k"])
@pytest.mark.parametrize("topk", [7, 0])
@pytest.mark.parametrize("engine", [checkpointed, partial(replay, hops=T)])
def test_engines_agree_with_the_unrolled_graph(backbone, prompts, reward, estimator, support, topk, engine):
    """float64, KL on, EOS on: values equal, relative gradient error <= 1e-6 (rounding leaves ~1e-13)."""
    cfg = config(estimator=estimator, support=support, gumbel_topk=topk)
    objective = Objective(reward, beta=0.3)
    want, want_grad = gradient(unrolled, backbone, prompts, objective, cfg, seed=4)
    got, got_grad = gradient(engine, backbone, prompts, objective, cfg, seed=4)
    assert (want.completion_mask == 0).any(), "the case must contain an early end of sequence"
    assert torch.equal(got.completion_ids * got.completion_mask, want.completion_ids * want.completion_mask)
    assert torch.equal(got.completion_mask, want.completion_mask)
    torch.testing.assert_close(got.reward, want.reward)
    torch.testing.assert_close(got.kl, want.kl)
    torch.testing.assert_close(got.loss, want.loss)
    assert relative_error(got_grad, want_grad) <= 1e-6


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
def test_unrolled_gumbel_matches_finite_differences(prompts, reward, estimator):
    """With soft tokens and fixed noise the loss is a smooth function of the parameters: check its gradient.

    GPT-2, because its layer norm is float64 in a float64 model; Llama's is not, and too coarse for a difference.

    The reference is a constant of the loss, so its inputs are frozen at the unperturbed soft tokens by beta = 0 here;
    KL's own gradient is checked in test_head.py. A straight-through gradient is not a derivative, so it must differ.
    """
    backbone = make_backbone(tiny_gpt2(), target_modules=["c_attn"])
    cfg = config(estimator=estimator, gumbel_topk=0)
    objective = Objective(reward, beta=0.0)
    _, grad = gradient(unrolled, backbone, prompts, objective, cfg, seed=4)
    direction = torch.randn(grad.shape, dtype=grad.dtype, generator=torch.Generator().manual_seed(1))

    def loss(eps):
        offset = 0
        with torch.no_grad():
            for p in backbone.trainable_parameters():
                p.add_(eps * direction[offset : offset + p.numel()].view_as(p))
                offset += p.numel()
        return gradient(unrolled, backbone, prompts, objective, cfg, seed=4)[0].loss.item()

    eps = 1e-6
    plus, minus = loss(eps), loss(-2 * eps)
    loss(eps)
    numeric, analytic = (plus - minus) / (2 * eps), (grad @ direction).item()
    error = abs(numeric - analytic) / abs(analytic)
    # central difference: truncation ~ eps^2, rounding ~ 1e-16 / eps = 1e-10
    assert error < 1e-5 if estimator == "gumbel" else error > 1e-2


@pytest.mark.parametrize("estimator", ["ste", "gumbel"])
def test_hops_converge_and_residual_reports_it(backbone, prompts, reward, estimator):
    cfg = config(estimator=estimator)
    objective = Objective(reward, beta=0.3)
    want = gradient(unrolled, backbone, prompts, objective, cfg)[1]
    steps = [gradient(replay, backbone, prompts, objective, cfg, hops=hops) for hops in range(T)]
    errors = [relative_error(grad, want) for _, grad in steps]
    assert errors[0] > 1e-3, "the feedback must matter in this case"
    assert errors[-1] <= 1e-6
    assert steps[0][0].residual is None
    assert steps[1][0].residual > 1e-4
    # The change of the adjoint a by the last hop, |a_n - a_{n-1}| / |a_n|, with each a taken hop by hop.
    graph = ReplayGraph(backbone, sample(backbone, prompts, cfg, torch.Generator().manual_seed(0)))
    (_, r, _), (_, _, k) = graph.reward(objective), graph.kl(objective.beta)
    pull, a = graph.pullback(graph.rollout, cfg), [r]
    for _ in range(2):
        a.append(r + torch.autograd.grad(graph.h, graph.e, pull(a[-1])[0] + k[0], retain_graph=True)[0])
    torch.testing.assert_close(steps[2][0].residual, (a[2] - a[1]).norm() / a[2].norm())
    # hops = T - 1 already exhausts the nilpotent chain, and one more hop would change nothing
    more = gradient(replay, backbone, prompts, objective, cfg, hops=T + 3)
    torch.testing.assert_close(more[1], steps[-1][1])


def test_a_policy_gradient_of_the_same_graph_is_that_of_the_completions_log_probabilities(backbone, prompts):
    rollout = sample(backbone, prompts, config(), torch.Generator().manual_seed(4))
    assert (rollout.completion_mask == 0).any(), "the case must contain an early end of sequence"
    coefficients = torch.linspace(-1, 2, len(prompts), dtype=torch.float64)
    graph = ReplayGraph(backbone, rollout)
    got = graph.parameter_gradient(graph.policy(coefficients))
    logps = completion_logps(backbone, prompts, rollout.completion_ids, rollout.completion_mask).sum(1)
    want = torch.autograd.grad(logps @ coefficients, backbone.trainable_parameters())
    torch.testing.assert_close(got, torch.cat([g.flatten() for g in want]))


def test_layer_checkpointing_changes_nothing(backbone, prompts, reward):
    objective = Objective(reward, beta=0.3)
    want = gradient(replay, backbone, prompts, objective, config(), hops=3)[1]
    got = gradient(replay, backbone, prompts, objective, config(), hops=3, gradient_checkpointing=True)[1]
    torch.testing.assert_close(got, want)
    assert not backbone.model.training and not any(m.training for m in backbone.modules() if m is not backbone)


@pytest.mark.parametrize(
    "options",
    [
        StepwiseOptions(compact=True),
        StepwiseOptions(online_kl=True),
        StepwiseOptions(reference_cache=True),
        StepwiseOptions(reward_embedding="gathered"),
        StepwiseOptions(reward_embedding="bagged"),
        StepwiseOptions(checkpoint=True),
        StepwiseOptions(drop_lists=True),
        StepwiseOptions(head_positions="last"),
    ],
    ids=lambda o: "+".join(k for k, v in vars(o).items() if v != getattr(StepwiseOptions(), k)),
)
def test_each_optimisation_alone_keeps_the_gradient(backbone, prompts, reward, options):
    objective = Objective(reward, beta=0.3)
    want = gradient(unrolled, backbone, prompts, objective, config())[1]
    got = gradient(partial(stepwise, options=options), backbone, prompts, objective, config())[1]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("engine", [unrolled, checkpointed, replay])
def test_nothing_of_a_step_outlives_it(prompts, reward, engine):
    backbone = make_backbone(tiny_gpt2(), target_modules=["c_attn"])
    gradient(engine, backbone, prompts, Objective(reward, beta=0.3), config())
    left = weakref.ref(backbone)
    del backbone
    gc.collect()
    assert left() is None, "the graph holds its own model"


@pytest.mark.parametrize("engine", [unrolled, checkpointed, replay])
def test_a_reward_that_is_not_finite_updates_nothing(backbone, prompts, engine):
    class Broken(ToyReward):
        def forward(self, embeds, mask):
            return super().forward(embeds, mask) * float("nan")

    with pytest.raises(InputError, match="reward: got .*nan.*; allowed: finite"):
        engine(backbone, prompts, Objective(Broken(16)), config(), torch.Generator().manual_seed(0))
    assert all(p.grad is None for p in backbone.trainable_parameters())


STRAIGHT_THROUGH = ["ste", "gumbel_rao", "reinmax"]


def unrolled_gradient(backbone, rollout, objective, cfg):
    """Token by token from a rollout's supports and noise, the graph kept: no adjoint, no hops, dense tensors."""
    embeds = backbone.embed(rollout.prompts.ids)
    mask, table, out, kls, tokens = rollout.prompts.mask, backbone.embedding_weight, [], [], []
    prefix = embeds
    for t in range(rollout.completion_ids.shape[1]):
        h = backbone.hidden(prefix, mask)[:, -1]
        with torch.no_grad(), backbone.reference():
            ref = backbone.hidden(prefix.detach(), mask)[:, -1]
        logp, ref_logp = backbone.head(h).log_softmax(-1), backbone.head(ref).log_softmax(-1)
        kls.append((logp.exp() * (logp - ref_logp)).sum(-1))
        hard = torch.nn.functional.one_hot(rollout.completion_ids[:, t], table.shape[0]).to(table.dtype)
        support, noise = rollout.support[:, t], rollout.noise[:, t]
        if support.ndim == 2:
            support, noise = support.unsqueeze(1), noise.unsqueeze(1)
        logits = backbone.head(h).unsqueeze(1)
        if cfg.estimator == "st":
            support = torch.arange(logits.shape[2]).expand_as(logits)
            if t < cfg.min_new_tokens:
                logits = logits.index_fill(2, torch.tensor(EOS), -torch.inf)
        logits = logits.expand(-1, support.shape[1], -1).gather(2, support)
        if cfg.estimator == "reinmax":
            p, soft = logits.softmax(-1), (logits / cfg.tau).softmax(-1)
            q = (hard.unsqueeze(1).gather(2, support) + soft) / 2
            soft = 2 * ((q / p).log().detach() + logits).softmax(-1) - p / 2  # the paper's algorithm 2
        elif cfg.estimator == "st":
            soft = logits.softmax(-1)
        else:
            soft = ((logits + noise) / cfg.tau).softmax(-1)
        y = sum(torch.zeros_like(hard).scatter(1, support[:, m], soft[:, m]) for m in range(support.shape[1]))
        y = y / support.shape[1]
        y = hard + y - y.detach()
        valid = rollout.completion_mask[:, t].view(-1, 1)
        tokens.append(torch.where(valid.bool(), y, hard))
        e = tokens[-1] @ table
        out.append(e)
        prefix = torch.cat([prefix, e.unsqueeze(1)], 1)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
    done = rollout.completion_mask
    own = lambda reads: reads.scale * (torch.stack(tokens, 1) @ reads.weight)  # noqa: E731
    reward = objective.reward(embeds, rollout.prompts, torch.stack(out, 1), done, own)
    kl = (torch.stack(kls, 1) * done).sum(1) / done.sum(1)
    grads = torch.autograd.grad(-reward.mean() + objective.beta * kl.mean(), backbone.trainable_parameters())
    return torch.cat([g.flatten() for g in grads])


@pytest.mark.parametrize("estimator", STRAIGHT_THROUGH)
@pytest.mark.parametrize(("support", "topk"), [("top_k", 7), ("perturbed_top_k", 7), ("perturbed_top_k", 0)])
def test_straight_through_replays_equal_a_naive_unrolled_graph(backbone, prompts, reward, estimator, support, topk):
    cfg = config(estimator=estimator, support=support, gumbel_topk=topk, rao_draws=3)
    objective = Objective(reward, beta=0.3)
    rollout = sample(backbone, prompts, cfg, torch.Generator().manual_seed(4))
    assert (rollout.completion_mask == 0).any()
    want = unrolled_gradient(backbone, rollout, objective, cfg)
    errors = [relative_error(gradient(replay, backbone, prompts, objective, cfg, rollout=rollout, hops=n)[1], want)
              for n in (0, 1, 2, T)]  # fmt: skip
    assert errors[-1] <= 1e-6 and errors[0] > 1e-3  # rounding leaves ~1e-13; the feedback matters


def own_tables_too():
    """A reward on the policy's table and two on tables of their own, one of them wider."""
    generator, parts = torch.Generator().manual_seed(5), [EmbeddingReward(ToyReward(16))]
    for width, scale in ((11, 0.7), (16, 1.3)):
        weight = torch.randn(23, width, dtype=torch.float64, generator=generator)
        parts.append(EmbeddingReward(ToyReward(width, seed=width), reads=EmbeddingTable(weight, scale)))
    return Rewards(parts, [0.5, -1.5, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("min_new_tokens", [0, 3])
@pytest.mark.parametrize("reward", [ToyReward(16), own_tables_too()], ids=["policy's table", "own tables too"])
def test_straight_through_without_noise_equals_a_naive_unrolled_graph(reward, min_new_tokens):
    """Full vocabulary, tau 1: ``y = onehot + softmax(l) - softmax(l).detach()``; GPT-2 is float64 throughout."""
    backbone, prompts = make_backbone(tiny_gpt2(), target_modules=["c_attn"]), make_prompts()
    cfg, objective = config(estimator="st", min_new_tokens=min_new_tokens), Objective(reward, beta=0.3)
    rollout = sample(backbone, prompts, cfg, torch.Generator().manual_seed(6))
    assert (rollout.completion_mask == 0).any()
    want = unrolled_gradient(backbone, rollout, objective, cfg)
    errors = [relative_error(gradient(replay, backbone, prompts, objective, cfg, rollout=rollout, hops=n)[1], want)
              for n in (0, 1, T)]  # fmt: skip
    assert errors[-1] <= 1e-9 and errors[0] > 1e-3  # rounding leaves ~1e-14; the feedback matters


@pytest.mark.parametrize("support", ["top_k", "perturbed_top_k"])
@pytest.mark.parametrize("estimator", STRAIGHT_THROUGH)
def test_noise_given_the_tokens_has_the_law_of_sampled_noise(backbone, estimator, support):
    """Supports and noise drawn given a rollout's tokens, against another rollout's own, n = 3000."""
    n = 3000
    one = make_prompts(1)
    prompts = one.repeat(n)
    cfg = config(estimator=estimator, support=support, rao_draws=2, max_new_tokens=3)
    own = sample(backbone, prompts, cfg, torch.Generator().manual_seed(0))
    other = ReplayGraph(backbone, sample(backbone, prompts, cfg, torch.Generator().manual_seed(1)))
    again = redrawn(other, cfg, torch.Generator().manual_seed(2))

    def statistics(rollout):
        ids, noise = rollout.support.view(n, 3, -1, 7), rollout.noise.view(n, 3, -1, 7).double()
        held = torch.zeros(n, 3, ids.shape[2], 23).scatter(3, ids, 1.0)
        top = torch.where(ids == rollout.completion_ids.view(n, 3, 1, 1), noise, 0).sum(3, keepdim=True)
        values = torch.cat([held.double(), top, top**2, noise.sum(3, keepdim=True)], 3)
        return (values * rollout.completion_mask.view(n, 3, 1, 1)).flatten(1)

    (a, b), zero = (statistics(r) for r in (own, again)), 1e-12
    stderr = ((a.var(0) + b.var(0)) / n).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() <= 4.5 * stderr + zero).all()  # up to 156 comparisons: 4.5
