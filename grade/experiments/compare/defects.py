"""GRADE's defects (arXiv 2601.11574 and its published code), each as a pair of functions: as coded, and as meant.

Small and exact, so that a notebook can flip one switch and show what it does. What the code does was read, not run; the
arithmetic is this project's own. Left out: what cannot be computed without the paper's runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from grade.experiments.setting import Setting
from grade.gradients.losses import gae
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import PolicyGradient
from grade.gradients.replay import replay
from grade.models.prompts import encode_prompts
from grade.stats import tensor_spread
from grade.training.config import TrainConfig
from grade.training.evaluate import evaluate
from grade.training.task import Task

# Table 1 of the paper: mean and standard deviation over the test samples, and how many there were (read in its code).
TEST_MEANS = {
    "gumbel": (0.5898, 0.3928),
    "ste": (0.7627, 0.3438),
    "ppo": (0.5104, 0.3127),
    "reinforce": (0.6173, 0.3779),
}
TEST_N = 500
FIRST_VALIDATION = (0.578, 0.610, 0.573, 0.520)  # after one update each: the nearest to an untrained policy it has
STEPS, BATCH, STATED_BATCH = 250, 2, 16


def gae_over_batch(rewards: Tensor, values: Tensor, gamma: float = 0.99, gae_lambda: float = 0.95) -> Tensor:
    """Generalised advantage estimation as the paper's code runs it: backwards over rows, so over the batch.

    Args:
        rewards: [B, T].
        values: [B, T].
        gamma: Discount.
        gae_lambda: Lambda.

    Returns:
        Advantages [B, T]; row b bootstraps from row b + 1, another completion.

    >>> gae_over_batch(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), torch.full((2, 2), 0.5))
    tensor([[-0.4753,  0.5247],
            [-0.5000, -0.5000]])
    """
    advantages, following = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for b in reversed(range(len(rewards))):
        next_values = values[b + 1] if b + 1 < len(rewards) else torch.zeros_like(values[b])
        following = rewards[b] + gamma * next_values - values[b] + gamma * gae_lambda * following
        advantages[b] = following
    return advantages


def gae_example(over_batch: bool, tokens: int = 8) -> Tensor:
    """Advantages of the first of two completions with rewards 1 and 0 at their last token and values 0.5.

    Args:
        over_batch: As coded, or over time.
        tokens: T.

    Returns:
        [T].
    """
    rewards, values = torch.zeros(2, tokens), torch.full((2, tokens), 0.5)
    rewards[0, -1] = 1.0
    if over_batch:
        return gae_over_batch(rewards, values)[0]
    return gae(rewards, values, torch.ones_like(rewards), 0.99, 0.95)[0][0]


def whitened(rewards: Sequence[float]) -> list[float]:
    """Advantages whitened over the batch, as the paper's REINFORCE: ``(r - mean) / std``, n - 1 in the denominator.

    >>> [round(a, 4) for a in whitened([0.9, 0.1])], [round(a, 4) for a in whitened([0.51, 0.50])]
    ([0.7071, -0.7071], [0.7071, -0.7071])
    >>> whitened([0.7])
    [nan]
    """
    n, mean = len(rewards), math.fsum(rewards) / len(rewards)
    if n == 1:
        return [math.nan]
    std = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (n - 1))
    return [(r - mean) / std for r in rewards]


def relative_variance(gradients: Tensor) -> float:
    """Trace of the covariance over the squared norm of the mean, of repeated gradients at fixed weights and prompts.

    Args:
        gradients: [M, N], M repetitions.

    Returns:
        Noise over signal, the same whatever the scale. The squared mean is corrected for its own noise, and is taken as
        no smaller than that noise: the figure is at most M, which then says that M repetitions show no signal.

    >>> relative_variance(torch.tensor([[1.0], [3.0]]))  # trace 2, squared mean 4 - 2 / 2
    0.6666666865348816
    >>> relative_variance(torch.tensor([[1.0], [-1.0]]))
    2.0
    """
    trace = gradients.var(0, correction=1).sum()
    blur = trace / len(gradients)
    return float(trace / torch.maximum(gradients.mean(0).square().sum() - blur, blur))


def repeated_gradients(task: Task, config: TrainConfig, batch: int, repetitions: int) -> tuple[Tensor, float]:
    """Gradients of one batch of prompts at fixed weights, with fresh noise each time.

    Args:
        task: Policy, reward, prompts; the policy is not moved.
        config: Method and lengths; ``reinforce`` gets the mean return of one draw as its baseline.
        batch: B prompts.
        repetitions: M.

    Returns:
        Gradients [M, N], and the paper's "variance" of the first one.
    """
    backbone, parameters = task.backbone, task.backbone.trainable_parameters()
    objective = Objective(task.reward_model, config.kl_coef, config.reward_scope)
    prompts = encode_prompts(backbone.tokenizer, task.train_prompts[:batch], config.max_prompt_tokens)
    prompts = prompts.to(backbone.device)
    learner = None if config.relaxed else PolicyGradient(config, backbone)
    rows, spread = [], 0.0  # the first draw only makes the baseline
    for i in range(repetitions + 1):
        generator = torch.Generator(backbone.device).manual_seed(i)
        backbone.zero_grad(set_to_none=True)
        if learner is None:
            replay(backbone, prompts, objective, config.relaxation(config.tau_start), generator, hops=config.hops)
        else:
            found = learner.accumulate(learner.sample(prompts, generator), objective)
            if i == 0:
                learner.means.append(-float(found.loss))
        if i == 1:
            # LoRA's A gets no gradient while B is 0: only tensors that have one count.
            norms = torch.stack([p.grad.norm() for p in parameters])
            spread = tensor_spread(norms[norms > 0].unsqueeze(0))
        if i > 0:
            rows.append(torch.cat([p.grad.flatten() for p in parameters]))
    backbone.zero_grad(set_to_none=True)
    return torch.stack(rows), float(spread)


def scope_difference(task: Task, n: int, **lengths: int) -> float:
    """Mean reward of the same completions with the prompt minus without: what the paper's methods were compared over.

    Args:
        task: Policy, reward, prompts.
        n: Held-out prompts.
        lengths: Of `grade.training.evaluate.evaluate`.

    Returns:
        A difference of rewards.
    """
    both, alone = (
        evaluate(task.backbone, task.validation_prompts[:n], task.reward_model, kl_prompts=0, scope=scope, **lengths)
        for scope in ("prompt_and_completion", "completion")
    )
    return float((both.reward - alone.reward).mean())


def loss_plus_reward(setting: Setting, beta: float) -> float:
    """Loss plus reward of one step of `ste`: 0 if KL is not in the loss, whatever the policy.

    Args:
        setting: Policy, prompts, reward; the policy is moved away from the reference for this step only.
        beta: Weight of KL.

    Returns:
        ``beta`` times the mean KL.
    """
    parameters = setting.backbone.trainable_parameters()
    start = [p.detach().clone() for p in parameters]
    generator = torch.Generator(setting.backbone.device).manual_seed(setting.seed)
    with torch.no_grad():
        for p in parameters:
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype, device=p.device))
    step, _ = replace(setting, objective=replace(setting.objective, beta=beta)).run(partial(replay, hops=0))
    with torch.no_grad():
        for p, value in zip(parameters, start, strict=True):
            p.copy_(value)
    return float(step.loss + step.reward.mean())


def z_of_difference(a: str, b: str) -> float:
    """The z of two test means of the paper, from its standard deviations and the n that its code used.

    >>> round(z_of_difference("ste", "reinforce"), 1), round(z_of_difference("reinforce", "gumbel"), 1)
    (6.4, 1.1)
    """
    (mean_a, sd_a), (mean_b, sd_b) = TEST_MEANS[a], TEST_MEANS[b]
    return (mean_a - mean_b) / math.sqrt((sd_a**2 + sd_b**2) / TEST_N)


def first_above(values: Sequence[float], level: float, window: int = 1) -> int | None:
    """First step at which a moving average, of as many values as there are up to ``window``, reaches a level.

    >>> first_above([0.888, 0.2, 0.3], 0.8), first_above([0.2, 0.3, 0.9], 0.8, window=2) is None
    (0, True)
    """
    for i in range(len(values)):
        part = values[max(0, i + 1 - window) : i + 1]
        if math.fsum(part) / len(part) >= level:
            return i
    return None
