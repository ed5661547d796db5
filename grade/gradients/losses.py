"""Policy-gradient losses as pure functions of tensors: advantages and surrogates.

No model and no sampling here; `grade.gradients.policy_gradient` calls these. Shapes as everywhere: B completions,
T tokens; a group is the G completions of one prompt, so grouped returns are [N, G] with B = N G. Masks are 1 at a
completion's tokens, end-of-sequence included, and 0 after it.

Every method ascends the same objective, ``E[R(y) - beta * mean_t KL_t]``, whose gradient is

    E[A(y) sum_t grad log pi(y_t)] - beta E[mean_t grad KL_t],        A(y) = R(y) - beta * mean_t KL_t - baseline,

unbiased for every baseline that does not depend on y. Tokens are summed, not averaged: averaging over each completion's
tokens changes the direction (it gives short completions more weight; Liu et al. 2025, arXiv:2503.20783).

Left out: entropy bonuses, and a clipped ratio of whole sequences (GSPO).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grade.errors import InputError
from grade.gradients.objective import ROUNDING, relative

STD_EPSILON = 1e-4
"""Added to a group's standard deviation."""


def ema_baseline(means: Sequence[float], momentum: float = 0.9) -> float:
    """Exponential moving average of earlier steps' mean returns, oldest first; 0 before any (Williams 1992).

    ``b = sum_i m^(k-i) r_i / sum_i m^(k-i)``: normalised, so it is not biased towards 0 in the first steps. It never
    includes the step that it is subtracted from, so the gradient stays unbiased.

    >>> ema_baseline([1.0, 4.0], 0.5)       # (0.5 * 1 + 1 * 4) / 1.5
    3.0
    """
    total = weight = 0.0
    for mean in means:
        total, weight = momentum * total + mean, momentum * weight + 1
    return total / weight if weight else 0.0


def rloo(returns: Tensor) -> Tensor:
    """Leave-one-out advantages ``A_g = r_g - mean_{g' != g} r_g'`` [N, G] (Kool et al. 2019; Ahmadian et al. 2024).

    A completion that was not scored (NaN) is in no mean, and has advantage 0.

    >>> rloo(torch.tensor([[1.0, 2.0, 6.0]]))       # 1 - 4, 2 - 3.5, 6 - 1.5
    tensor([[-3.0000, -1.5000,  4.5000]])
    """
    scored = _scored(returns)
    return (relative(returns) * (scored / (scored - 1))).nan_to_num(0.0)


def above(returns: Tensor, baseline: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Returns [N, G] minus a baseline, exactly 0 where the two differ by the rounding of a type alone.

    For the baseline of the greedy completions' returns [N, 1] it is ReMax's advantage (Li et al. 2023, 2310.10505).

    >>> above(torch.tensor([[1.0, 3.0, 1.0000001]]), 1.0, torch.float32)
    tensor([[0., 2., 0.]])
    """
    difference = returns - baseline
    return difference * (difference.abs() > ROUNDING * torch.finfo(dtype).eps * returns.abs())


def grpo(returns: Tensor, normalize_std: bool = False) -> Tensor:
    """Group-relative advantages [N, G] (Shao et al. 2024, arXiv:2402.03300).

    With ``normalize_std``, as published: ``(r_g - mean) / (std + eps)``. Without, Dr. GRPO's ``r_g - mean``
    (arXiv:2503.20783) times ``G / (G - 1)``: a completion's own return is part of the mean, which shrinks the expected
    gradient by ``1 - 1/G``, and the factor undoes that. The result is `rloo`, which is unbiased. Dividing by the
    standard deviation is biased: it gives more weight to prompts whose completions differ less.
    """
    if not normalize_std:
        return rloo(returns)
    scored, centred = _scored(returns), relative(returns)
    std = (centred.square().nansum(1, keepdim=True) / (scored - 1)).sqrt()
    if std.isinf().any():
        largest = f"{returns.abs().nan_to_num(0.0).max():g}"
        raise InputError("reward", largest, "numbers whose squares are finite, with scale_rewards = group")
    return (centred / (std + STD_EPSILON)).nan_to_num(0.0)


def _scored(returns: Tensor) -> Tensor:
    """How many completions of each group were scored [N, 1]."""
    if (group := returns.shape[1]) < 2:
        raise InputError("num_generations", group, "at least 2: the baseline averages a prompt's other completions")
    return (~returns.isnan()).sum(1, keepdim=True).to(returns.dtype)


def token_rewards(reward: Tensor, kl: Tensor, mask: Tensor, beta: float) -> Tensor:
    """The penalised return token by token [B, T]: ``-beta KL_t / length`` at each, plus the reward at the last."""
    length = mask.sum(-1, keepdim=True)
    last = torch.arange(mask.shape[1], device=mask.device) == length - 1
    return (reward.unsqueeze(1) * last - beta * kl / length) * mask


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over time (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lambda A_{t+1}`` within each completion, from
    rewards [B, T] and values [B, T] of the states before each token; value and advantage are 0 after its last token.
    With lambda = 1 the advantage is the full return minus V, with 0 that of one step. The results are advantages and
    targets of the value function, ``A + V``, each [B, T] and 0 where masked.
    """
    mask = mask.to(values.dtype)
    advantages = torch.zeros_like(values)
    after = advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * after - values[:, t]
        advantage = (delta + gamma * gae_lambda * advantage) * mask[:, t]
        after = values[:, t] * mask[:, t]
        advantages[:, t] = advantage
    return advantages, (advantages + values) * mask


def moments(values: Tensor, mask: Tensor) -> Tensor:
    """``(n, sum x, sum x^2)`` [3] of the valid entries in float64, additive over microbatches."""
    kept = values.double() * mask
    return torch.stack([mask.double().sum(), kept.sum(), (kept * kept).sum()])


def equal(over: Tensor, dtype: torch.dtype) -> bool:
    """Whether values of this type with these `moments` differ by rounding alone; fewer than two do."""
    n, total, squares = over.tolist()
    # What is left of equal values is rounding of their own type, or of the float64 squares.
    return n < 2 or squares - total * total / n <= max((ROUNDING * torch.finfo(dtype).eps) ** 2, 1e-14) * squares


def whiten(values: Tensor, mask: Tensor, over: Tensor | None = None) -> tuple[Tensor, float]:
    """``(x - mean) / std`` [B, T] of the valid entries, 0 where masked, with n - 1 in the variance; and ``1 / std``.

    ``over`` are the `moments` of the whole step, if ``values`` are a part of it. Equal values give 0 and factor 1.
    """
    over = moments(values, mask) if over is None else over
    if equal(over, values.dtype):
        return torch.zeros_like(values), 1.0
    n, total, squares = over.tolist()
    mean = total / n
    factor = ((squares - n * mean * mean) / (n - 1)) ** -0.5
    return (values - mean) * factor * mask, factor


def clipped_surrogate(logps: Tensor, old_logps: Tensor, advantages: Tensor, epsilon: float) -> Tensor:
    """``min(rho A, clip(rho, 1 - eps, 1 + eps) A)`` [B, T], to be maximised; ``rho = pi / pi_old`` token by token.

    At ``pi = pi_old`` its gradient is that of ``A log pi``. Schulman et al. 2017 (arXiv:1707.06347), equation 7.
    """
    ratio = (logps - old_logps).exp()
    return torch.minimum(ratio * advantages, ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)


def clip_fraction(logps: Tensor, old_logps: Tensor, mask: Tensor, epsilon: float) -> Tensor:
    """Share of tokens whose ratio lies outside the clip range, a scalar."""
    outside = ((logps - old_logps).exp() - 1).abs() > epsilon
    return (outside * mask).sum().double() / mask.sum()
