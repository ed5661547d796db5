"""Divergences and their gradients against dense logits, and against enumerated completions, in float64."""

from collections.abc import Sequence
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.enumeration import completion_logps, every_completion, random_prompts, tiny_policy
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import Completions, PolicyGradient, StepContext
from grade.models.backbone import Backbone
from grade.models.base import FrozenBase
from grade.models.parameters import flatten, trained_parameters
from grade.models.scoring import predicting_hidden
from grade.models.teacher import Teacher
from grade.rewards.rewards import Rewards, TeacherReward

ENUMERATED = {"reinforce": 1, "rloo": 2, "grpo": 2}
"""Methods beside which a teacher is a reward, and completions of a prompt: all tuples of so many are enumerated."""
WEIGHT = 0.7
_VOCAB, _LENGTH = 4, 2  # 13 completions, 169 pairs


def divergence_table(betas: Sequence[float]) -> pd.DataFrame:
    """Largest absolute errors by beta: columns check, beta, value and gradient.

    ``dense``: a teacher's divergence along completions and its gradient, row by row, against autograd on logits of all
    tokens at once. Of a method: the expected gradient beside a reward, enumerated, against that of the exact objective,
    in which a token also changes the divergence of those that follow; ``value`` is empty.
    """
    return pd.DataFrame(
        [("dense", beta, *_dense_errors(beta)) for beta in betas]
        + [(method, beta, None, _enumerated_error(method, beta)) for method in ENUMERATED for beta in betas],
        columns=["check", "beta", "value", "gradient"],
    )


def dense_divergence(logits: Tensor, teacher_logits: Tensor, beta: float) -> Tensor:
    """Generalised Jensen-Shannon divergence over the last axis as it is written (arXiv:2306.13649)."""
    p, q = logits.softmax(-1), teacher_logits.softmax(-1)
    if beta in (0.0, 1.0):
        of, to = (q, p) if beta == 0 else (p, q)
        return (of * (of.log() - to.log())).sum(-1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (q.log() - m.log()) + (1 - beta) * p * (p.log() - m.log())).sum(-1)


def _teacher(policy: Backbone, beta: float, vocab: int) -> Teacher:
    other = tiny_policy(vocab, width=12, seed=1)
    return Teacher(policy, "another model", WEIGHT, beta, own=FrozenBase(other.peft.merge_and_unload()))


def _along(policy: Backbone, teacher: Teacher, text: Completions) -> Tensor:
    """Divergence of each token [B, T] from all logits, 0 where masked."""
    states = (predicting_hidden(each, text.prompts, text.ids) for each in (policy, teacher.own))
    student, taught = (head(each) for head, each in zip((policy.head, teacher.head), states, strict=True))
    return dense_divergence(student, taught.detach(), teacher.beta) * text.mask


def _dense_errors(beta: float) -> tuple[float, float]:
    policy = tiny_policy(vocab=130)
    teacher, prompts = _teacher(policy, beta, vocab=130), random_prompts(policy, 6)
    ids = torch.randint(3, 130, (6, 5), generator=torch.Generator().manual_seed(2))
    text = Completions(prompts, ids, torch.ones_like(ids).tril(2))
    hidden = predicting_hidden(policy, prompts, ids)
    found = teacher.divergence(hidden, teacher.hidden(prompts, ids), text.mask)
    want = _along(policy, teacher, text)
    weights = torch.linspace(0.5, 1.5, want.numel(), dtype=want.dtype).view(want.shape)
    gradients = [flatten(torch.autograd.grad((each * weights).sum(), trained_parameters(policy)))
                 for each in (found, want)]  # fmt: skip
    return float((found - want).detach().abs().max()), float((gradients[0] - gradients[1]).abs().max())


def _enumerated_error(method: str, beta: float) -> float:
    policy, group = tiny_policy(_VOCAB), ENUMERATED[method]
    teacher, prompt = _teacher(policy, beta, _VOCAB), random_prompts(policy, 1)
    ids, mask = every_completion(_VOCAB, _LENGTH, policy.eos_token_ids)
    prompts = prompt.repeat(len(ids))
    probability = completion_logps(policy, prompt, _LENGTH)[0].exp()
    divergence = _along(policy, teacher, Completions(prompts, ids, mask)).sum(1) / mask.sum(1)
    parameters = trained_parameters(policy)
    want = flatten(torch.autograd.grad((probability * WEIGHT * divergence).sum(), parameters))
    rewards = Rewards([TeacherReward(teacher)], [WEIGHT], dtype=torch.float64)
    config = MethodConfig(method=method, num_generations=group, max_completion_length=_LENGTH, scale_rewards="none")
    total = torch.zeros_like(want)
    for rows in map(list, product(range(len(ids)), repeat=group)):
        policy.peft.zero_grad(set_to_none=True)
        batch = Completions(prompts[rows], ids[rows], mask[rows])
        PolicyGradient(config, policy).step(
            [batch], Objective(rewards, 0.0, teacher=teacher), StepContext(1, lambda: None)
        )
        total += probability.detach()[rows].prod() * flatten([p.grad for p in parameters])
    return float((total - want).abs().max())
