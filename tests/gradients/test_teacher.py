"""Divergences from a teacher against dense logits and enumeration; what may be a teacher."""

from itertools import product

import pytest
import torch
from conftest import VOCAB, make_backbone, make_prompts, perturb_adapter, tiny_gpt2
from gradients.test_policy_gradient import BETA, Reward, enumerated, flat_grad, gradient, learner, policy
from models.test_head import HEADS, make_head, randn

from grade.gradients.learner import StepContext
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.base import FrozenBase
from grade.models.batch import Completions
from grade.models.scoring import predicting_hidden
from grade.rewards.rewards import Rewards
from grade.training.teacher import Teacher, TeacherGradient, TeacherReward, jensen_shannon, make_teacher, with_context

N, V = 9, 130
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def dense(logits, teacher_logits, beta):
    """Generalised Jensen-Shannon divergence over the last axis as it is written (arXiv:2306.13649)."""
    p, q = logits.softmax(-1), teacher_logits.softmax(-1)
    if beta in (0.0, 1.0):
        of, to = (q, p) if beta == 0 else (p, q)
        return (of * (of.log() - to.log())).sum(-1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (q.log() - m.log()) + (1 - beta) * p * (p.log() - m.log())).sum(-1)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("v", [V, V - 30, V + 30])
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_divergences_and_gradients_against_dense_logits(options, v, beta):
    head, other = make_head(**options), make_head(v=v)
    h, states, weight = randn(N, 5, seed=3).requires_grad_(), randn(N, 5, seed=4), randn(N)
    shared = min(v, V)
    want = dense(head(h)[:, :shared], other(states)[:, :shared], beta)
    got, _ = jensen_shannon(head, h, other, states, beta)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    grads = (torch.autograd.grad(each, h, weight)[0] for each in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("v", [V, V - 30, V + 30])
def test_ends_are_one_token_with_the_sum_of_their_probabilities(v, beta):
    head, other, ends = make_head(softcap=2.0, temperature=0.7), make_head(v=v), [3, 40, 41]
    h, states, weight = randn(N, 5, seed=3).requires_grad_(), randn(N, 5, seed=4), randn(N)
    others = [token for token in range(min(v, V)) if token not in ends]

    def merged(logits):
        return torch.cat([logits[:, others], logits[:, ends].logsumexp(-1, keepdim=True)], 1)

    want = dense(merged(head(h)), merged(other(states)), beta)
    got, _ = jensen_shannon(head, h, other, states, beta, ends=tuple(ends))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    grads = (torch.autograd.grad(each, h, weight)[0] for each in (got, want))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_equal_distributions_do_not_diverge(beta):
    """Exactly: an optimizer would make steps of what is left of rounding."""
    head, h = make_head(dtype=torch.float32), randn(N, 5, dtype=torch.float32).requires_grad_()
    each, _ = jensen_shannon(head, h, head, h.detach(), beta)
    assert not each.any() and not torch.autograd.grad(each.sum(), h)[0].any()


def enumerated_divergence(backbone, teacher, completions):
    hidden = (predicting_hidden(each, completions.prompts, completions.ids) for each in (backbone, teacher.model))
    student, own = (head(h) for head, h in zip((backbone.head, teacher.head), hidden, strict=True))
    each = dense(student, own.detach(), teacher.beta) * completions.mask
    return each.sum(1) / completions.mask.sum(1)


def beside(backbone, scale=1.0, beta=1.0, kl=0.0):
    """The objective of a reward beside a teacher, both times ``scale``."""
    other = make_backbone(policy().model.config, target_modules=["c_attn"], seed=5)
    teacher = Teacher(backbone, weight=0.7 * scale, beta=beta, model=FrozenBase(other.peft.unload()))
    parts = [Objective(Reward(16)).reward_model, TeacherReward(teacher)]
    return Objective(Rewards(parts, [scale, 0.7 * scale], dtype=torch.float64), kl, terms=[teacher])


def step_of(own, completions, objective):
    own.backbone.zero_grad(set_to_none=True)
    own.step([completions], objective, StepContext(1, lambda: None))
    return gradient(own.backbone)


@pytest.mark.parametrize(("method", "beta"), [("rloo", 0.5), ("grpo", 1.0), ("reinforce", 0.0)])
def test_beside_a_reward_the_expected_gradient_has_the_divergences_future_terms(method, beta):
    """All pairs of completions of a policy of three tokens: ``E[R - beta mean KL - w mean D]``, exactly."""
    backbone = policy()
    goal = beside(backbone, beta=beta, kl=BETA)
    every, probability, returns, _ = enumerated(backbone)
    divergence = enumerated_divergence(backbone, goal.terms[0], every)
    assert divergence.max() > 0.1
    want = flat_grad(-(probability * (returns - 0.7 * divergence)).sum(), backbone)
    group, total = 1 if method == "reinforce" else 2, 0.0
    for rows in map(list, product(range(len(every.ids)), repeat=group)):
        own = learner(backbone, method, num_generations=group)
        total = total + probability.detach()[rows].prod() * step_of(own, every[rows], goal)
    torch.testing.assert_close(total, want, rtol=1e-8, atol=1e-10)


def test_the_divergences_own_gradient_is_whitened_as_the_rewards_is():
    backbone = policy()
    every, *_ = enumerated(backbone)
    some = every[[0, 3, 4, 6]]
    ppo = [learner(backbone, "ppo", num_generations=1) for _ in range(2)]
    once, ten = (step_of(own, some, beside(backbone, scale)) for own, scale in zip(ppo, (1.0, 10.0), strict=True))
    torch.testing.assert_close(once, ten, rtol=1e-6, atol=1e-9)  # what is added to the standard deviation is 1e-8


@pytest.mark.parametrize("near", [0.0, 0.3])
def test_alone_it_descends_the_mean_divergence_along_what_it_is_given(near):
    backbone, other = (make_backbone(tiny_gpt2(), seed=seed, target_modules=["c_attn"]) for seed in (0, 3))
    teacher = Teacher(backbone, beta=0.5, model=FrozenBase(other.peft.unload()))
    prompts, ids = make_prompts(3), torch.tensor([[5, 6, 2], [8, 9, 10], [11, 2, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]])
    own = TeacherGradient(MethodConfig(method="teacher"), backbone)
    objective = Objective(Rewards([TeacherReward(teacher)], dtype=torch.float64), near, terms=[teacher])
    (step,) = own.step([Completions(prompts, ids, mask)], objective, StepContext(1, lambda: None))
    got = gradient(backbone)
    divergence = enumerated_divergence(backbone, teacher, Completions(prompts, ids, mask))
    logp = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
    with backbone.reference():
        reference = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1).detach()
    kl = ((logp.exp() * (logp - reference)).sum(-1) * mask).sum(1) / mask.sum(1)
    torch.testing.assert_close(got, flat_grad((divergence + near * kl).mean(), backbone), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(step.reward, -divergence.detach())
    assert torch.allclose(objective.score(backbone, prompts, ids, mask), step.reward, rtol=1e-9)


def test_another_model_as_teacher_is_read_at_the_policys_temperature():
    backbone, other = (make_backbone(tiny_gpt2(), seed=seed, target_modules=["c_attn"]) for seed in (0, 3))
    backbone, prompts, ids = backbone.view(temperature=0.7), make_prompts(3), torch.tensor([[5, 6], [8, 9], [11, 3]])
    teacher = Teacher(backbone, model=FrozenBase(other.peft.unload()))
    hidden, states = predicting_hidden(backbone, prompts, ids), teacher.hidden(prompts, ids)
    pairs = (hidden, backbone), (states, teacher.model)
    want = dense(*(each @ base.head.weight.T / 0.7 for each, base in pairs), 1.0)
    torch.testing.assert_close(teacher.divergence(hidden, states, torch.ones_like(ids))[0], want)


SYSTEM, PARTS = {"role": "system", "content": "Be brief."}, [{"type": "text", "text": "Be brief."}]


@pytest.mark.parametrize(
    ("row", "context", "prompt"),
    [
        ({"prompt": "2+2=", "answer": None}, "It is {answer!r:>3}. ", "2+2="),
        ({"prompt": "2+2=", "answer": {"best": None}}, "It is {answer[best]}. ", "It is None. 2+2="),
        ({"prompt": "2+2=", "answer": 0, "other": None}, "It is {answer}. {{other}} ", "It is 0. {other} 2+2="),
        ({"prompt": [SYSTEM]}, "Hint", [{**SYSTEM, "content": "Hint\n\nBe brief."}]),
        ({"prompt": [{**SYSTEM, "content": PARTS}]}, "Hint",
         [{**SYSTEM, "content": [{"type": "text", "text": "Hint"}, *PARTS]}]),
    ],
)  # fmt: skip
def test_a_context_stands_in_front_of_a_prompt_where_its_columns_have_values(row, context, prompt):
    assert with_context(row, context) == {**row, "prompt": prompt}


def test_an_adapter_on_the_same_base_is_a_teacher_without_another_copy(tmp_path):
    other, backbone = perturb_adapter(make_backbone(), seed=4), make_backbone()
    other.save_adapter(tmp_path)
    before = [p.detach().clone() for p in backbone.trainable_parameters()]
    teacher = make_teacher(tmp_path, backbone)
    prompts, ids = make_prompts(3), torch.tensor([[5, 6], [8, 9], [11, 3]])
    hidden = predicting_hidden(backbone, prompts, ids)  # its graph needs the policy's values
    states = teacher.hidden(prompts, ids)
    torch.testing.assert_close(states, predicting_hidden(other, prompts, ids).detach())
    teacher.divergence(hidden, states, torch.ones_like(ids))[0].sum().backward()
    assert gradient(backbone).abs().sum() > 0
    assert all(torch.equal(p, b) for p, b in zip(backbone.trainable_parameters(), before, strict=True))
    backbone.save_adapter(tmp_path / "own")
    own = make_teacher(tmp_path / "own", backbone)
    assert own.divergence(hidden, own.hidden(prompts, ids), torch.ones_like(ids))[0].abs().max() == 0


@pytest.mark.parametrize("beside", [True, False])
def test_a_teacher_on_the_same_base_has_its_own_token_bias_and_not_the_policys(beside, tmp_path):
    """Beside an adapter or alone; the base itself has none."""
    backbone, other = make_backbone(), make_backbone()
    if not beside:
        other = Backbone(other.peft.unload())
    own, policys = torch.randn(2, VOCAB, dtype=torch.float64)
    other.set_token_bias(own)
    other.save_adapter(tmp_path)
    backbone.set_token_bias(policys, trainable=True)
    prompts, ids = make_prompts(3), torch.tensor([[5, 6], [8, 9], [11, 3]])
    hidden = predicting_hidden(backbone, prompts, ids)
    plain = backbone.ref_head(hidden)
    with backbone.reference():
        reference = backbone.head(predicting_hidden(backbone, prompts, ids))
    for given, logits in ((tmp_path, (plain if beside else reference) + own), ("base", reference)):
        teacher = make_teacher(given, backbone)
        found, _ = teacher.divergence(hidden, teacher.hidden(prompts, ids), torch.ones_like(ids))
        p, q = (plain + backbone.token_bias).log_softmax(-1), logits.log_softmax(-1).detach()
        want = (p.exp() * (p - q)).sum(-1)
        torch.testing.assert_close(found, want)
        grads = [flat_grad(value.sum(), backbone) for value in (found, want)]
        torch.testing.assert_close(*grads)
