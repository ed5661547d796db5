"""The exact gradient, on a policy small enough to enumerate every completion.

In float64, on the tiny random GPT-2 of `grade.experiments.enumeration`, with two random reward models: ``bag`` (on the
embedding table) and ``trunk`` (through the frozen layers). So bias is known, not estimated against another estimator.
"""

import torch
from torch import Tensor

from grade.experiments.enumeration import completion_logps, every_completion
from grade.experiments.estimators.measure.rows import KL, Setting
from grade.gradients.objective import Objective, sequence_mean
from grade.models.backbone import Backbone
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden
from grade.rewards.model import HeadSettings, RewardModel

_HEAD_SCALE = 4.0  # weights of a random head are small: rewards would hardly differ between completions


def tiny_rewards(policy: Backbone) -> dict[str, RewardModel]:
    """Random reward models ``bag`` and ``trunk`` on a policy's own base."""
    rewards = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for kind in ("bag", "trunk"):
            model = RewardModel(kind, policy, HeadSettings(dropout=0.0))
            with torch.no_grad():
                model.head[-1].weight.mul_(_HEAD_SCALE)
            rewards[kind] = model.requires_grad_(False)
    return rewards


def exact_gradients(setting: Setting) -> dict[str, Tensor]:
    """Exact gradient [P] of each expected reward, and of KL if the setting has it, by enumeration.

    ``mean over prompts of sum_y pi(y) R(y)``, and the same with the completion's mean KL, which depends on the policy
    itself as well.
    """
    backbone, prompts, gradients = setting.backbone, setting.prompts, {}
    ids, mask = every_completion(backbone.vocab_size, setting.length, backbone.eos_token_ids)
    probabilities = completion_logps(backbone, prompts, setting.length).exp()  # [B, N]
    for name in [*setting.rewards, *([KL] if setting.kl else [])]:
        values = []
        for n in range(len(prompts)):
            many = prompts[[n] * len(ids)]
            if name == KL:
                values.append(_kl(backbone, many, ids, mask))
            else:
                objective = Objective(setting.rewards[name], 0.0)
                values.append(objective.reward(backbone.embed(many.ids), many, backbone.embed(ids), mask).detach())
        expected = (probabilities * torch.stack(values)).sum(1).mean()
        grads = torch.autograd.grad(expected, backbone.trainable_parameters(), retain_graph=True)
        gradients[name] = flatten(grads)
    return gradients


def _kl(backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean KL over each completion's tokens [N], from dense logits, with gradient."""
    logp = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
    with torch.no_grad(), backbone.reference():
        ref_logp = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
    return sequence_mean((logp.exp() * (logp - ref_logp)).sum(-1), mask)
