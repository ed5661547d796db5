"""Gradient estimators against the exact gradient, on a policy small enough to enumerate every completion.

In float64, on the tiny random GPT-2 of `grade.experiments.enumeration`, with two random reward models: ``bag`` (on the
embedding table) and ``trunk`` (through the frozen layers). So bias is known, not estimated against another estimator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from grade.experiments.enumeration import completion_logps, every_completion
from grade.experiments.estimators.measure.rows import KL, Rows, Setting, Variant
from grade.experiments.intervals import interval
from grade.experiments.moments import moments
from grade.gradients.objective import Objective, sequence_mean
from grade.models.backbone import Backbone
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden
from grade.rewards.model import HeadSettings, RewardModel

_HEAD_SCALE = 4.0  # weights of a random head are small: rewards would hardly differ between completions


def tiny_rewards(policy: Backbone, seed: int = 0) -> dict[str, RewardModel]:
    """Random reward models ``bag`` and ``trunk`` on a policy's own base."""
    rewards = {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for kind in ("bag", "trunk"):
            model = RewardModel(kind, policy, HeadSettings(dropout=0.0))
            with torch.no_grad():
                model.head[-1].weight.mul_(_HEAD_SCALE)
            rewards[kind] = model.requires_grad_(False)
    return rewards


def variants(full: int, taus: Sequence[float], topk: int, draws: Sequence[int]) -> list[Variant]:
    """What is compared: every estimator over hops at tau 1; over tau, K and M at ``full`` hops."""
    grid = []
    for estimator in ("ste", "gumbel_rao", "reinmax", "gumbel"):
        largest = max(draws)
        grid += [Variant(estimator, 1.0, hops, draws=largest) for hops in sorted({0, 1, 2, full}) if hops <= full]
        grid += [Variant(estimator, tau, full, draws=largest) for tau in taus]
        grid += [Variant(estimator, 1.0, full, topk, largest)]
    grid += [Variant("gumbel_rao", 1.0, full, draws=m) for m in draws]
    return list(dict.fromkeys(grid))


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
                objective = Objective(setting.rewards[name], 0.0, setting.scope)
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


def quality_table(rows: Rows, exact: dict[str, Tensor]) -> pd.DataFrame:
    """Quality of each estimator, of one sample, relative to the exact gradient.

    `grpo` is held against ``1 - 1/G`` of the gradient, its expectation (see `measure.rows.advantages`); for KL, where
    only a part of the gradient shrinks, it is left out.

    One row per reward and estimator: bias2 and its standard error, both over ``|mu|^2``; along, the relative bias
    along mu, ``<m, mu> / |mu|^2 - 1``, and its standard error; variance and mse over ``|mu|^2``; snr; cosine of one
    sample and of the mean; n samples in all.
    """
    table = []
    for (reward, estimator), gradients in rows.gradients.items():
        if (reward, estimator) == (KL, "grpo"):
            continue
        truth = exact[reward] * (1 - 1 / rows.group if estimator == "grpo" else 1)
        m = moments(gradients, truth, rows.size)
        bias2, along = interval(m.bias2 / m.ref2), interval(m.inner / m.ref2 - 1)
        table.append(dict(
            reward=reward, estimator=estimator, bias2=bias2.value, bias2_stderr=bias2.stderr, along=along.value,
            along_stderr=along.stderr, variance=m.noise[0] / m.ref2[0], mse=m.mse()[0] / m.ref2[0], snr=m.snr[0],
            cosine=m.cosine()[0], cosine_mean=m.cosine(float("inf"))[0], n=len(gradients) * rows.size,
        ))  # fmt: skip
    return pd.DataFrame(table)


def worst_bias(table: pd.DataFrame, estimators: Sequence[str]) -> float:
    """Largest bias of these estimators in standard errors, along the truth or squared, over rewards."""
    rows = table[table.estimator.isin(estimators)]
    return float(max((rows.along / rows.along_stderr).abs().max(), (rows.bias2 / rows.bias2_stderr).abs().max()))


def mse_ratio_table(
    rows: Rows, exact: dict[str, Tensor], rewards: Sequence[str], draws: Sequence[int], full: int
) -> pd.DataFrame:
    """Mean squared error of `gumbel_rao` over `ste`'s, both at tau 1.

    Columns reward, draws, ratio of one sample's errors, low and high (95 %, geometric).
    """

    def mse(reward: str, variant: Variant) -> np.ndarray:
        return moments(rows.gradients[reward, variant.name], exact[reward], rows.size).mse()

    table = []
    for reward in rewards:
        ste = mse(reward, Variant("ste", 1.0, full))
        for m in draws:
            ratio = interval(mse(reward, Variant("gumbel_rao", 1.0, full, draws=m)) / ste, geometric=True)
            table.append(dict(reward=reward, draws=m, ratio=ratio.value, low=ratio.low, high=ratio.high))
    return pd.DataFrame(table)
