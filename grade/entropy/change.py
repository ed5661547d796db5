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

from grade.entropy.samples import SampleScores
from grade.stats import jackknife_stderr


@dataclass(frozen=True)
class _Reweighted:
    """Entropy before and after, in nats."""

    before: float  # mean of the old integrand
    after: float  # self-normalised mean of the new one
    change: float
    stderr: float  # standard error of the change, over prompts, or over samples if there is only one prompt
    ess: float  # effective sample size
    weights: Tensor  # of all samples, their mean 1

    def pareto_k(self) -> float | None:
        """Shape of the generalised Pareto distribution of the largest weights, ``min(n / 5, 3 sqrt(n))`` of them.

        Above 0.7 the estimate cannot be trusted (Vehtari et al. 2024, arXiv:1507.02646). None with fewer than 50
        samples or equal weights.
        """
        n = len(self.weights)
        count = int(min(n / 5, 3 * math.sqrt(n)))
        top = self.weights.sort(descending=True).values
        if n < 50 or top[0] == top[count]:
            return None
        excess = (top[:count] - top[count]).clamp_min(1e-300).numpy()
        return float(genpareto.fit(excess / excess.mean(), floc=0)[0])


def reweighted_change(old: SampleScores, new: SampleScores, mask: Tensor | None = None) -> _Reweighted:
    """Change of entropy under a step, from scores of the same samples under the old and the new policy.

    The integrand is a sample's sum of token entropies. With the tokens' ``mask`` [B, G, T] it is the entropy per token.
    """
    length = torch.ones_like(old.logps[..., :1]) if mask is None else mask.double()
    old_logps, new_logps, old, new, length = (x.double().sum(-1) for x in (*_parts(old, new), length))
    log_w = new_logps - old_logps
    w = (log_w - log_w.max()).exp()
    w = w / w.mean()
    before = old.sum() / length.sum()
    after = (w * new).sum() / (w * length).sum()
    influence = w * (new - after * length) / (w * length).mean() - (old - before * length) / length.mean()
    units = influence.mean(1) if len(influence) > 1 else influence[0]
    stderr = units.std() / math.sqrt(len(units))
    ess = float(w.sum() ** 2 / (w**2).sum())
    return _Reweighted(float(before), float(after), float(after - before), float(stderr), ess, w.flatten())


def prefix_change(old: SampleScores, new: SampleScores) -> Tensor:
    """Each sample's part [B, G] of the change of entropy per sequence (their mean), by importance weights of prefixes.

        H_new - H_old = E sum_t ( (w_{<t} - 1) (h'_t - b_t) + h'_t - h_t ),   w_{<t} = prod_{s < t} pi_new / pi_old

    with h and h' a token's entropy before and after (per-decision importance sampling: Precup et al. 2000). The control
    variate ``b_t`` is the mean of h'_t over the prompt's other completions. Its derivative at a step of 0 is, sample by
    sample, `grade.entropy.samples.Directional.per_sequence`: prediction and truth share their noise. Arguments are the
    scores of the same samples under the old and the new policy.
    """
    old_logps, new_logps, old, new = _parts(old, new)
    log_w = new_logps - old_logps
    before = log_w.cumsum(-1) - log_w  # of the prefix: without the token itself
    others = (new.sum(1, keepdim=True) - new) / max(new.shape[1] - 1, 1)
    return (torch.expm1(before) * (new - others) + new - old).sum(-1)


def linearity_error(linear: Tensor, change: Tensor) -> tuple[float, float]:
    """``mean(linear) / mean(change) - 1``, and its jackknife standard error over prompts: how far a step is from small.

    Predicted and true change, each [B, G], have the same noise (see `prefix_change`), so their ratio is far more
    precise than either, and for any samples it tends to 1 as the step goes to 0.
    """
    a, b = linear.double().mean(1), change.double().mean(1)
    without = (a.sum() - a) / (b.sum() - b)
    return float(a.sum() / b.sum()) - 1, jackknife_stderr(without)


def _parts(old: SampleScores, new: SampleScores) -> list[Tensor]:
    """Log-probabilities and then entropies, old and new, in float64."""
    return [part.double() for part in (old.logps, new.logps, old.entropies, new.entropies)]
