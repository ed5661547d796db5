"""Defects of the GRADE paper (arXiv 2601.11574) that need a model to be shown.

Its code was read, not run. Left out: the arithmetic of its figures and code (`grade.experiments.limit.paper`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from grade.experiments.setting import Setting, kl_at_start, make_setting
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.gradients.replay import replay
from grade.models.backbone import Backbone
from grade.models.parameters import flatten, restoring
from grade.models.prompts import PromptBatch
from grade.rewards.model import RewardModel
from grade.training.config import TrainConfig
from grade.training.evaluate import evaluate


def measure_defects(
    policy: Backbone, reward: RewardModel, texts: Sequence[str], prompts: PromptBatch, configs: dict[str, TrainConfig],
    repetitions: int,
) -> dict[str, float]:  # fmt: skip
    """The paper's defects on a task, with an untrained policy; names begin with ``defects/``.

    ``texts`` begin with prompts; ``prompts`` are those of the repeated gradients; ``configs`` are runs of `ste` and
    `reinforce`, from which lengths come as well.
    """
    config = configs["ste"]
    length, tokens = config.max_completion_length, config.max_prompt_length
    setting = make_setting(policy, reward, texts, 4, min(4, tokens), length, config.gumbel_topk)
    start = kl_at_start(setting)
    figures = {"kl_aligned_max": start["kl_at_init_max"], "kl_late": start["kl_at_init_misaligned"]}
    for method, run in configs.items():
        rows, spread = repeated_gradients(policy, Objective(reward, 0.0, run.reward_scope), prompts, run, repetitions)
        figures |= {f"spread_{method}": spread, f"relative_variance_{method}": relative_variance(rows)}
    both, alone = (
        evaluate(
            policy, texts[:64], reward, kl_prompts=0, scope=scope, max_prompt_tokens=tokens, max_new_tokens=length,
            min_new_tokens=length,
        )
        for scope in ("prompt_and_completion", "completion")
    )  # fmt: skip
    figures["scope_difference"] = float((both.reward - alone.reward).mean())  # of the same completions
    figures["loss_plus_reward"] = loss_plus_reward(setting, beta=0.0)
    return {f"defects/{name}": value for name, value in figures.items()}


def relative_variance(gradients: Tensor) -> float:
    """Noise over signal of repeated gradients [M, N]: trace of the covariance over the squared norm of the mean.

    The squared mean is corrected for its own noise, and is taken as no smaller than that noise: the figure is at most
    M, which then says that M repetitions show no signal.

    >>> relative_variance(torch.tensor([[1.0], [3.0]]))  # trace 2, squared mean 4 - 2 / 2
    0.6666666865348816
    >>> relative_variance(torch.tensor([[1.0], [-1.0]]))
    2.0
    """
    trace = gradients.var(0, correction=1).sum()
    blur = trace / len(gradients)
    return float(trace / torch.maximum(gradients.mean(0).square().sum() - blur, blur))


def repeated_gradients(
    policy: Backbone, objective: Objective, prompts: PromptBatch, config: TrainConfig, repetitions: int
) -> tuple[Tensor, float]:
    """Gradients [M, N] of one batch of prompts at fixed weights, each with fresh noise; the first's "variance"."""
    parameters = policy.trainable_parameters()
    learner = None if config.relaxed else PolicyGradient(config, policy)
    rows, spread = [], 0.0  # the first draw only makes the baseline
    for i in range(repetitions + 1):
        generator = torch.Generator(policy.device).manual_seed(i)
        policy.zero_grad(set_to_none=True)
        if learner is None:
            replay(policy, prompts, objective, config.relaxation(), generator, hops=config.hops)
        else:
            step = learner.accumulate(learner.sample(prompts, generator), objective)
            if i == 0:
                learner.means.append(-float(step.loss))
        if i == 1:
            # LoRA's A gets no gradient while B is 0: only tensors that have one count.
            norms = torch.stack([p.grad.norm() for p in parameters])
            spread = norms[norms > 0].unsqueeze(0).double().std(1, correction=0)  # the paper's "variance"
        if i > 0:
            rows.append(flatten(p.grad for p in parameters))
    policy.zero_grad(set_to_none=True)
    return torch.stack(rows), float(spread)


def loss_plus_reward(setting: Setting, beta: float) -> float:
    """Loss plus reward of one step of `ste`, ``beta`` times the mean KL: 0 if KL is not in the loss."""
    parameters, generator = setting.backbone.trainable_parameters(), setting.noise()
    with restoring(parameters):
        with torch.no_grad():
            for p in parameters:
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device))
        step, _ = replace(setting, objective=replace(setting.objective, beta=beta)).run(partial(replay, hops=0))
    return float(step.loss + step.reward.mean())
