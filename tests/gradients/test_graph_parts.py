"""What the replayed graph gives besides the relaxed gradient, how often passes are made, and what has no graph."""

import pytest
import torch
from conftest import ToyReward, make_backbone, make_prompts, tiny_gpt2
from torch import nn
from torch.testing import assert_close

from grade.errors import InputError
from grade.gradients import policy_gradient, rollout
from grade.gradients.distilled import store as store_module
from grade.gradients.distilled.families import SKETCH, make_family
from grade.gradients.distilled.store import Batch, Store
from grade.gradients.estimators import RelaxationConfig, conditional_draws, likeliest_support, relax
from grade.gradients.losses import whiten
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient, StepContext
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import condition, sample
from grade.models.scoring import score

T = 4


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(scope="module")
def policy():
    return make_backbone(tiny_gpt2(), target_modules=["c_attn"])


@pytest.fixture(scope="module")
def drawn(policy):
    return sample(policy, make_prompts(), RelaxationConfig(gumbel_topk=5, max_new_tokens=T), generator(3))


def test_a_graph_gives_the_policy_gradient_too(policy, drawn):
    weights, graph = tensor(0.5, -2.0, 1.0), ReplayGraph(policy, drawn)
    v = graph.policy(weights)
    assert v.shape == graph.h.shape and not v.requires_grad and (v[drawn.completion_mask == 0] == 0).all()
    found = graph.parameter_gradient(v)
    logps = score(policy, drawn.prompts, drawn.completion_ids, drawn.completion_mask).logps.sum(1)
    want = torch.autograd.grad(logps @ weights, policy.trainable_parameters())
    assert_close(found, torch.cat([g.flatten() for g in want]))
    assert_close(graph.parameter_gradient(v), found)  # the graph is kept


def test_a_graphs_reward_and_its_slope(policy, drawn):
    graph, made = ReplayGraph(policy, drawn), Objective(ToyReward(16), 0.1)
    reward, r = graph.reward(made)
    assert not reward.requires_grad and not r.requires_grad
    leaf = policy.embed(drawn.completion_ids).detach().requires_grad_()
    value = made.reward(policy.embed(drawn.prompts.ids), drawn.prompts, leaf, drawn.completion_mask)
    assert_close(reward, value.detach()), assert_close(r, torch.autograd.grad(-value.mean(), leaf)[0])


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_a_graphs_kl_is_that_of_scoring(beta, policy, drawn):
    graph = ReplayGraph(policy, drawn)
    kl, k = graph.kl(beta)
    mask = drawn.completion_mask
    inputs = torch.cat([policy.embed(drawn.prompts.ids), policy.embed(drawn.completion_ids)[:, :-1]], 1)
    with torch.no_grad(), policy.reference():
        reference = policy.head(policy.hidden(inputs, graph.inputs[1])[:, graph.first :]).log_softmax(-1)
    leaf = graph.h.detach().requires_grad_()
    logp = policy.head(leaf).log_softmax(-1)
    want = (logp.exp() * (logp - reference)).sum(-1) * mask
    # KL is summed in float32 whatever the model's type
    assert_close(kl.double(), want.detach(), rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad((beta * want.sum(1) / mask.sum(1)).mean(), leaf)
    assert_close(k, slope, rtol=1e-5, atol=1e-7)
    assert not k.requires_grad and not kl.requires_grad


def test_another_estimators_noise_on_the_same_tokens(policy, drawn):
    config = RelaxationConfig(estimator="gumbel_rao", gumbel_topk=5, rao_draws=2, max_new_tokens=T)
    other = ReplayGraph(policy, drawn).given(config, generator())
    assert torch.equal(other.completion_ids, drawn.completion_ids) and other.support.shape == (3, T, 2, 5)
    assert not other.noise.requires_grad and torch.equal(other.embeds, drawn.embeds)


def test_embeddings_of_completions_alone_where_the_scope_says_so(policy):
    prompts, embeds, mask = make_prompts(2, 3), torch.randn(2, 4, 16), torch.ones(2, 4, dtype=torch.long)
    seen = []

    def reward(embeds, mask):
        seen.append((embeds.shape[1], mask.shape[1]))
        return embeds.sum((1, 2))

    for scope, length in (("completion", 4), ("prompt_and_completion", 7)):
        made = Objective(reward, scope=scope)
        made.reward(torch.randn(2, 3, 16), prompts, embeds, mask)
        assert seen.pop() == (length, length)


# --- sampling


def test_the_last_token_is_not_read_by_the_policy(policy, monkeypatch):
    steps, inner = [], rollout.Decoder.advance
    monkeypatch.setattr(rollout.Decoder, "advance", lambda self, e: steps.append(e.shape) or inner(self, e))
    sample(policy, make_prompts(2), RelaxationConfig(gumbel_topk=5, max_new_tokens=T), generator())
    assert len(steps) == T - 1
    sample(policy, make_prompts(2), RelaxationConfig(gumbel_topk=5, max_new_tokens=1), generator())
    assert len(steps) == T - 1


def test_completions_from_elsewhere_fit_the_context(policy):
    config = RelaxationConfig(estimator="st")
    for length, fits in ((59, True), (60, False)):
        ids = torch.full((2, length), 5)
        if fits:
            found = condition(policy, make_prompts(2), ids, torch.ones_like(ids), config, generator())
            assert found.completion_ids.shape == (2, 59) and not found.embeds.requires_grad
        else:
            with pytest.raises(InputError, match="got 65; allowed: at most 64"):
                condition(policy, make_prompts(2), ids, torch.ones_like(ids), config, generator())


@pytest.mark.parametrize("support", ["top_k", "perturbed_top_k"])
def test_supports_given_a_token_are_those_of_their_kind(support):
    logits = torch.randn(4, 6, generator=generator(), dtype=torch.float64)
    token = torch.tensor([0, 1, 2, 3])
    whole = conditional_draws(logits, token, RelaxationConfig(support=support, gumbel_topk=0), generator(), 2)
    same = conditional_draws(logits, token, RelaxationConfig(support=support, gumbel_topk=6), generator(), 2)
    for (ids, noise), (others, other) in zip(whole, same, strict=True):
        assert torch.equal(ids, torch.arange(6).expand(4, 6)) and torch.equal(others, ids)
        assert torch.equal(noise, other)
    few = conditional_draws(logits, token, RelaxationConfig(support=support, gumbel_topk=3), generator(), 20)
    fixed = likeliest_support(logits, token, 3)
    assert all(torch.equal(ids, fixed) for ids, _ in few) == (support == "top_k")


@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 3, 4)])
def test_tokens_are_relaxed_over_the_last_dimension(shape):
    z = torch.randn(shape, generator=generator(), dtype=torch.float64, requires_grad=True)
    hard, soft = relax(z, 0.5, "ste"), relax(z, 0.5, "gumbel")
    assert torch.equal(hard.argmax(-1), z.argmax(-1)) and torch.equal(hard.sum(-1), torch.ones(shape[:-1]).double())
    assert_close(soft, (2 * z).softmax(-1)) and set(hard.unique().tolist()) == {0.0, 1.0}
    g = torch.randn(shape, generator=generator(1), dtype=torch.float64)
    assert_close(torch.autograd.grad(hard, z, g)[0], torch.autograd.grad(soft, z, g)[0])


# --- policy gradients


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        (dict(method="rloo"), 2),  # the reference's and the policy's
        (dict(method="grpo"), 2),
        (dict(method="remax"), 4),  # and both of the greedy completions
        (dict(method="grpo", num_iterations=2), 4),  # scored first, then one in each update
        (dict(method="grpo", minibatches=2), 4),
        (dict(method="ppo", num_iterations=1), 3),
    ],
)
def test_how_many_passes_a_step_takes(options, passes, policy, monkeypatch):
    calls, inner = [], policy_gradient.predicting_hidden
    monkeypatch.setattr(policy_gradient, "predicting_hidden", lambda *args: calls.append(1) or inner(*args))
    group = {} if options["method"] in ("ppo", "remax") else {"num_generations": 2}
    own = PolicyGradient(MethodConfig(max_completion_length=3, **options, **group), policy)
    policy.zero_grad(set_to_none=True)
    applied = []
    context = StepContext(1, lambda: applied.append(1))
    own.step([(make_prompts(2), generator())], Objective(ToyReward(16), 0.1), context)
    assert len(calls) == passes and len(applied) == own.config.updates


class Trained(ToyReward):
    """A reward whose own weights are being trained somewhere else."""

    def __init__(self):
        super().__init__(16)
        w = self.w
        del self.w
        self.w = nn.Parameter(w)


@pytest.mark.parametrize("options", [dict(method="rloo"), dict(method="grpo", num_iterations=2), dict(method="ppo")])
def test_what_a_step_reports_has_no_graph_and_only_the_policy_gets_a_gradient(options, policy):
    group = {} if options["method"] == "ppo" else {"num_generations": 2}
    own, reward = PolicyGradient(MethodConfig(max_completion_length=3, **options, **group), policy), Trained()
    policy.zero_grad(set_to_none=True)
    (step,) = own.step([(make_prompts(2), generator())], Objective(reward, 0.1), StepContext(1, lambda: None))
    assert not any(value.requires_grad for value in (step.reward, step.kl, step.loss)) and reward.w.grad is None
    assert all(p.grad is not None for p in policy.trainable_parameters())
    assert not any(value.requires_grad for values in own.figures.values() for value in values)
    policy.zero_grad(set_to_none=True)


# --- whitening and stores


@pytest.mark.parametrize(("difference", "fine"), [(1e-7, False), (2e-7, True)])
def test_values_that_differ_by_rounding_of_their_squares_are_equal(difference, fine):
    # A variance of d^2 / 2 against 1e-14 of the mean square: rounding of the squares, 4e-16, is far below both.
    values = tensor(1.0, 1.0 + difference)[None]
    if fine:
        assert whiten(values, torch.ones(1, 2))[1] == pytest.approx(2**0.5 / difference, rel=0.05)
    else:
        with pytest.raises(InputError, match="2 equal ones"):
            whiten(values, torch.ones(1, 2))


@pytest.mark.parametrize(("enough", "due"), [(0.0, True), (11.9, True), (12.0, True), (12.1, False)])
def test_a_fit_is_due_when_half_of_what_a_choice_needs_is_waiting(enough, due, monkeypatch):
    monkeypatch.setattr(store_module, "growth", lambda completions: enough)
    made = Store({}, 2, 100)
    made.waiting = [Batch(torch.zeros(4), torch.zeros(4, 1), {}), Batch(torch.zeros(2), torch.zeros(2, 1), {})]
    assert len(made) == 6 and made.due is due


@pytest.mark.parametrize(("enough", "choices"), [(5.0, 2), (6.0, 2), (6.1, 1)])
def test_a_choice_is_made_again_when_as_many_are_new_as_it_needs(enough, choices, policy, monkeypatch):
    calls = []
    made = Store({"bag": make_family("bag", policy)}, 3, 100)
    inner = made._choose
    monkeypatch.setattr(made, "_choose", lambda: calls.append(made.fresh) or inner())
    for seed in (0, 1):
        x = torch.randn(6, 16, generator=generator(seed), dtype=torch.float64)
        made.add({"bag": x}, x[:, 0], torch.zeros(6, 1, dtype=torch.long))
        monkeypatch.setattr(store_module, "growth", lambda completions, seed=seed: enough if seed else 1e9)
        assert made.fit(1) is not None
    assert len(calls) == choices


def test_signs_of_the_sketch_stay_as_they_are_in_checkpoints(policy):
    first, second = make_family("values", policy)._signs
    assert first.shape == (17, SKETCH) and second.shape == (16, SKETCH)
    again = generator()
    for sign in (first, second):
        assert torch.equal(sign, torch.where(torch.randint(2, sign.shape, generator=again) == 1, 1.0, -1.0).double())
