"""How much of the residual to add to the plug-in gradient, from the gradients themselves.

A step's gradient has two parts: the plug-in a (of the distilled reward: nearly no noise, biased) and the residual d
(what a is short of: unbiased, noisy), with ``E[a + d] = mu``, the true gradient. Of all ``a + w d`` the one with the
largest expected cosine to mu, ``<E a + w E d, mu> / sqrt(E|a + w d|^2)``, has

    w = (B p - A q) / (A r - B q),    A = <E a, mu>,  B = <E d, mu>,  p = E|a|^2,  q = E<a, d>,  r = E|d|^2.

Products of means come from different microbatches (``sum_{i != j} a_i . d_j``), so noise does not enter them, and all
are averaged over the steps so far with a decay. The sum is then scaled so that its expected projection on mu is that of
mu itself: ``|mu|^2 / (A + w B)``; otherwise KL would pull the policy back from a small w.

A useless distillation has ``A = 0``: any w > 0 then gives the residual alone, scaled back to size, which is `rloo`. A
perfect one has ``B = 0`` and gives the plug-in. Source of the blend: Wiener filtering; for control variates with a
learned weight see Grathwohl et al. 2018 (arXiv:1711.00123).
"""

from __future__ import annotations

import torch
from torch import Tensor

DECAY = 0.9
LEAST, MOST = 0.02, 20.0
"""Bounds of the weight, where the plug-in is trusted at all, and of the scale."""


class Blend:
    """Moments of the two parts over the steps so far.

    Attributes:
        moments: Decayed sums of ``<Ea,Ea>, <Ea,Ed>, <Ed,Ed>, |a|^2, <a,d>, |d|^2``, and of the weights.
    """

    def __init__(self) -> None:
        self.moments = torch.zeros(7, dtype=torch.float64)

    def add(self, plug: Tensor, residual: Tensor, squares: Tensor, shares: float) -> None:
        """Add a step, made of disjoint parts.

        Args:
            plug: a [P], the sum of the parts' ``a_i``, each of which carries its share of the step.
            residual: d [P], likewise.
            squares: Sums over the parts of ``|a_i|^2``, ``<a_i, d_i>`` and ``|d_i|^2`` [3].
            shares: Sum of the squared shares: 1 / n for n equal parts.
        """
        a, d = plug.double(), residual.double()
        whole = torch.stack([a @ a, a @ d, d @ d]).cpu()
        means = (whole - squares.double().cpu()) / (1 - shares)
        self.moments = DECAY * self.moments + torch.cat([means, whole, torch.ones(1, dtype=torch.float64)])

    def weight(self) -> tuple[float, float]:
        """The residual's weight in `LEAST`..1, and the scale of the sum in 1..`MOST`."""
        aa, ad, dd, p, q, r, steps = self.moments.tolist()
        if not steps:
            return 1.0, 1.0
        along_a, along_d = aa + ad, ad + dd
        if along_a <= 0:
            return 1.0, 1.0
        if along_d <= 0:
            return LEAST, 1.0
        top, bottom = along_d * p - along_a * q, along_a * r - along_d * q
        weight = 1.0 if bottom <= 0 else min(max(top / bottom, LEAST), 1.0)
        scale = (along_a + along_d) / (along_a + weight * along_d)
        return weight, min(max(scale, 1.0), MOST)
