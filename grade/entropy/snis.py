"""The entropy after a step from samples of the policy before it: self-normalised importance sampling.

With ``w_i = exp(S_new - S_old)``, normalised to sum to one in log space, and an integrand h of the new policy,

    H_new = sum_i w_i h_i      ESS = (sum w)^2 / sum w^2

per sequence; per token, ``sum w h / sum w L``. Standard errors come from influence functions over independent units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.stats import genpareto
from torch import Tensor

from grade.errors import InputError


@dataclass(frozen=True)
class Reweighted:
    """Entropy before and after, in nats.

    Attributes:
        before: Mean of the old integrand.
        after: Self-normalised mean of the new one.
        change: after - before.
        stderr: Standard error of the change.
        ess: Effective sample size.
        clipped: Fraction of weights that were cut.
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
        clip: Cut weights above this many times their mean, before normalising. Biases toward the old policy.

    Returns:
        The estimates. Units of the standard error are prompts, or samples if there is only one prompt.

    Raises:
        InputError: If shapes differ, a value is not finite, or there are fewer than two samples.
    """
    parts = [old_logps, new_logps, old, new, *([] if lengths is None else [lengths])]
    if len({p.shape for p in parts}) > 1 or old.ndim != 2 or old.numel() < 2:
        raise InputError("samples", [list(p.shape) for p in parts], "equal shapes [B, G], at least two samples")
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


def linearity_error(
    d_logps: Tensor, d_values: Tensor, old_logps: Tensor, new_logps: Tensor, old: Tensor, new: Tensor,
    clip: float | None = None,
) -> tuple[float, float]:  # fmt: skip
    """``linear / change - 1``: how far a step is from the limit of small ones, on the samples that there are.

    ``change`` is that of `reweighted_change`, per sequence, and ``linear`` its own derivative along the step,
    ``mean(dh) + mean((h - hbar) dS)``. Both have the same noise, so the ratio is known far better than either, and
    tends to 1 as the step goes to 0 whatever the samples are.

    Args:
        d_logps: dS along the step [B, G].
        d_values: dh along the step [B, G].
        old_logps: As of `reweighted_change`, and so are the others [B, G].
        new_logps: See there.
        old: See there.
        new: See there.
        clip: See there.

    Returns:
        The error and its jackknife standard error over prompts.

    Raises:
        InputError: If there are fewer than three prompts.
    """
    batch = len(old)
    if batch < 3:
        raise InputError("prompts", batch, "at least 3: the jackknife leaves one out")
    parts = [p.double() for p in (d_logps, d_values, old_logps, new_logps, old, new)]

    def ratio(rows: Tensor) -> float:
        d_s, d_h, s_old, s_new, h_old, h_new = (p[rows] for p in parts)
        w, _ = _weights(s_old, s_new, clip)
        linear = d_h.mean() + ((h_old - h_old.mean()) * d_s).mean()
        return float(linear / ((w * h_new).mean() - h_old.mean()))

    every = torch.arange(batch)
    without = torch.tensor([ratio(every[every != n]) for n in range(batch)], dtype=torch.float64)
    stderr = ((batch - 1) / batch * (without - without.mean()).square().sum()).sqrt()
    return ratio(every) - 1, float(stderr)


def _weights(old_logps: Tensor, new_logps: Tensor, clip: float | None) -> tuple[Tensor, float]:
    """Weights of mean 1, and the fraction of them that was cut."""
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
