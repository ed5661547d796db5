"""Defects of the GRADE paper (arXiv 2601.11574) that need a model to be shown, each measured on this project's task.

Its code was read, not run. Left out: the arithmetic of its figures and code (`grade.experiments.compare.paper`).
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from grade.experiments.setting import Setting
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.gradients.replay import replay
from grade.models.parameters import flatten, restoring
from grade.models.prompts import encode_prompts
from grade.training.config import TrainConfig
from grade.training.evaluate import evaluate
from grade.training.load import Task


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


def repeated_gradients(task: Task, config: TrainConfig, batch: int, repetitions: int) -> tuple[Tensor, float]:
    """Gradients [M, N] of one batch of prompts at fixed weights, each with fresh noise; the first's "variance"."""
    backbone, parameters = task.backbone, task.backbone.trainable_parameters()
    objective = Objective(task.reward_model, config.beta, config.reward_scope)
    prompts = encode_prompts(backbone.tokenizer, task.train_prompts[:batch], config.max_prompt_length)
    prompts = prompts.to(backbone.device)
    learner = None if config.relaxed else PolicyGradient(config, backbone)
    rows, spread = [], 0.0  # the first draw only makes the baseline
    for i in range(repetitions + 1):
        generator = torch.Generator(backbone.device).manual_seed(i)
        backbone.zero_grad(set_to_none=True)
        if learner is None:
            replay(backbone, prompts, objective, config.relaxation(), generator, hops=config.hops)
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
    backbone.zero_grad(set_to_none=True)
    return torch.stack(rows), float(spread)


def scope_difference(task: Task, n: int, **lengths: int) -> float:
    """Mean reward of the same completions with the prompt minus without: the paper compares across the two."""
    both, alone = (
        evaluate(task.backbone, task.validation_prompts[:n], task.reward_model, kl_prompts=0, scope=scope, **lengths)
        for scope in ("prompt_and_completion", "completion")
    )
    return float((both.reward - alone.reward).mean())


def loss_plus_reward(setting: Setting, beta: float) -> float:
    """Loss plus reward of one step of `ste`, ``beta`` times the mean KL: 0 if KL is not in the loss."""
    parameters, generator = setting.backbone.trainable_parameters(), setting.noise()
    with restoring(parameters):
        with torch.no_grad():
            for p in parameters:
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device))
        step, _ = replace(setting, objective=replace(setting.objective, beta=beta)).run(partial(replay, hops=0))
    return float(step.loss + step.reward.mean())
