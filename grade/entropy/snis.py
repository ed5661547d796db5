"""The entropy after a step from samples of the policy before it: self-normalised importance sampling.

With ``w_i = exp(S_new - S_old)``, normalised to sum to one in log space, and an integrand h of the new policy,

    H_new = sum_i w_i h_i      ESS = (sum w)^2 / sum w^2

per sequence; per token, ``sum w h / sum w L``. Standard errors come from influence functions over independent units.

Token by token the change can be estimated without bias and without normalising, because a token's entropy depends
only on its prefix: `prefix_change`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import genpareto
from torch import Tensor

from grade.errors import InputError
from grade.stats import jackknife_stderr


@dataclass(frozen=True)
class Reweighted:
    """Entropy before and after, in nats.

    Attributes:
        before: Mean of the old integrand.
        after: Self-normalised mean of the new one.
        change: after - before.
        stderr: Standard error of the change.
        ess: Effective sample size.
        clipped: Fraction of weights that were clipped.
        pareto_k: Shape of the generalised Pareto tail of the weights: above 0.7 the estimate cannot be trusted
            (Vehtari et al. 2024, arXiv:1507.02646); None with fewer than 50 samples or equal weights.
    """

    before: float
    after: float
    change: float
    stderr: float
    ess: float
    clipped: float
    pareto_k: float | None


def reweighted_change(
    old_logps: Tensor, new_logps: Tensor, old: Tensor, new: Tensor, lengths: Tensor | None = None,
    clip: float | None = None,
) -> Reweighted:  # fmt: skip
    """Change of entropy under a step.

    Args:
        old_logps: S of each sample under the policy that drew it [B, G].
        new_logps: S under the policy after the step [B, G].
        old: Integrand before [B, G]: ``-S_old``, or the sum of token entropies.
        new: Integrand after [B, G].
        lengths: Tokens of each sample [B, G], for entropy per token; None: per sequence.
        clip: Clip weights at this multiple of their mean, before normalising. Biases towards the old policy.

    Returns:
        The estimates. Units of the standard error are prompts, or samples if there is only one prompt.

    Raises:
        ValueError: If shapes differ or there are fewer than two samples.
        InputError: If a value is not finite.
    """
    parts = [old_logps, new_logps, old, new, *([] if lengths is None else [lengths])]
    if len({p.shape for p in parts}) > 1 or old.ndim != 2 or old.numel() < 2:
        raise ValueError(f"{[list(p.shape) for p in parts]} are not equal shapes [B, G] with at least two samples")
    if not all(torch.isfinite(p).all() for p in parts):
        raise InputError("samples", "NaN or infinity", "finite log-probabilities and entropies")
    parts = [p.double() for p in parts]
    old_logps, new_logps, old, new = parts[:4]
    length = torch.ones_like(old) if lengths is None else parts[4]
    k = _pareto_k(_weights(old_logps, new_logps, None)[0].flatten())
    w, clipped = _weights(old_logps, new_logps, clip)
    before = old.sum() / length.sum()
    after = (w * new).sum() / (w * length).sum()
    influence = w * (new - after * length) / (w * length).mean() - (old - before * length) / length.mean()
    units = influence.mean(1) if len(influence) > 1 else influence[0]
    stderr = units.std() / math.sqrt(len(units))
    ess = float(w.sum() ** 2 / (w**2).sum())
    return Reweighted(float(before), float(after), float(after - before), float(stderr), ess, clipped, k)


def prefix_change(old_logps: Tensor, new_logps: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Each sample's part of the change of entropy per sequence (their mean), with importance weights of prefixes.

        H_new - H_old = E sum_t ( (w_{<t} - 1) (h'_t - b_t) + h'_t - h_t ),   w_{<t} = prod_{s < t} pi_new / pi_old

    with h and h' a token's entropy before and after (per-decision importance sampling: Precup et al. 2000). The control
    variate ``b_t`` is the mean of h'_t over the prompt's other completions. Its derivative at a step of 0 is, sample by
    sample, `grade.entropy.forward.Directional.per_sequence`: prediction and truth share their noise.

    Args:
        old_logps: Log-probability of each token under the policy that drew it [B, G, T], 0 where masked.
        new_logps: Under the policy after the step [B, G, T].
        old: Entropy of each token's distribution before [B, G, T], 0 where masked.
        new: After [B, G, T].

    Returns:
        [B, G].

    Raises:
        ValueError: If shapes differ.
        InputError: If a value is not finite.
    """
    parts = [old_logps, new_logps, old, new]
    if len({p.shape for p in parts}) > 1 or old.ndim != 3:
        raise ValueError(f"{[list(p.shape) for p in parts]} are not equal shapes [B, G, T]")
    if not all(torch.isfinite(p).all() for p in parts):
        raise InputError("samples", "NaN or infinity", "finite log-probabilities and entropies")
    old_logps, new_logps, old, new = (p.double() for p in parts)
    log_w = new_logps - old_logps
    before = log_w.cumsum(-1) - log_w  # of the prefix: without the token itself
    others = (new.sum(1, keepdim=True) - new) / max(new.shape[1] - 1, 1)
    return (torch.expm1(before) * (new - others) + new - old).sum(-1)


def linearity_error(linear: Tensor, change: Tensor) -> tuple[float, float]:
    """``mean(linear) / mean(change) - 1``: how far a step is from the limit of small ones, on the given samples.

    Both have the same noise (see `prefix_change`), so their ratio is far more precise than either, and for any samples
    it tends to 1 as the step goes to 0.

    Args:
        linear: Each sample's part of the predicted change [B, G].
        change: Each sample's part of the change [B, G].

    Returns:
        The error and its jackknife standard error over prompts.

    Raises:
        InputError: If there are fewer than three prompts.
    """
    batch = len(change)
    if batch < 3:
        raise InputError("prompts", batch, "at least 3: the jackknife leaves one out")
    a, b = linear.double().mean(1), change.double().mean(1)
    without = (a.sum() - a) / (b.sum() - b)
    return float(a.sum() / b.sum()) - 1, jackknife_stderr(without)


def _weights(old_logps: Tensor, new_logps: Tensor, clip: float | None) -> tuple[Tensor, float]:
    """Weights of mean 1, and the fraction of them that was clipped."""
    log_w = new_logps - old_logps
    w, clipped = (log_w - log_w.max()).exp(), 0.0
    if clip is not None:
        if not clip > 0:
            raise InputError("clip", clip, "a factor above 0, or none")
        limit = clip * w.mean()
        clipped = float((w > limit).double().mean())
        w = w.clamp(max=float(limit))
    return w / w.mean(), clipped


def _pareto_k(w: Tensor) -> float | None:
    """Shape of the generalised Pareto distribution fitted to the largest weights, ``min(n / 5, 3 sqrt(n))`` of them."""
    n = len(w)
    count = int(min(n / 5, 3 * math.sqrt(n)))
    top = w.sort(descending=True).values
    if n < 50 or top[0] == top[count]:
        return None
    excess = (top[:count] - top[count]).clamp_min(1e-300).numpy()
    return float(genpareto.fit(excess / excess.mean(), floc=0)[0])
