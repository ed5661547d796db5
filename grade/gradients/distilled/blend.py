"""How much of the residual to add to the plug-in gradient.

A step's gradient has two parts: the plug-in a, nearly without noise, and the residual d, with ``E[a + d] = mu``, the
true gradient. The sum ``a + w d`` comes closest to mu in direction at

    w = E / (E + V),    E = |E d|^2,    V = tr Cov(d),

if the two parts are orthogonal (a Wiener filter). V is measured: parts of a step that share no completion differ by
noise alone. It is divided by the `HORIZON` steps that the optimizer's momentum averages, for noise averages out over
steps, and bias does not. E cannot be measured within a few steps, as noise hides it. It follows from the share f of the
squared gradient that is the plug-in's: ``E = |a|^2 (1 - f) / f``. For f the root of R2 is taken: a rough rule, and a
cautious one, as part of the reward's variance is interactions that no gradient has. Token counts with R2 of .07, .09,
.53 and .68 had squared cosines to mu of .26, .58, .77 and .87, but token values with R2 of .003 had .46.

An uncertain fit counts for less. Its reliability is k t, with k the shrinkage of the slope (`ridge.Choice`) and t the
trust (`store.Evidence`): the weight is ``1 - k t (1 - w)``, and a carries the factor k t, which E above does not have.
So a useless fit gives `rloo` exactly, a reliable one that explains much almost the plug-in.
"""

from __future__ import annotations

import torch
from torch import Tensor

DECAY = 0.7
"""Of the averages over earlier measurements."""
HORIZON = 10
"""Steps that AdamW's first moment averages: 1 / (1 - 0.9)."""
EVERY = 4
"""Steps between measurements, which take two more backward passes."""


class Blend:
    """Squared norms of the two parts over the steps so far.

    Attributes:
        moments: Decayed sums of ``|a|^2`` without the factor k t, V and 1.
        before: The residual of the last step, where a step has a single part.
    """

    def __init__(self) -> None:
        self.moments = torch.zeros(3, dtype=torch.float64)
        self.before = torch.zeros(0)

    def add(self, plug: Tensor, residual: Tensor, square: float, shares: float, reliability: float) -> None:
        """Add a step that is made of disjoint parts.

        ``plug`` is a [P], ``residual`` d [P] is the sum of the parts' ``d_i``, each of which carries its share of the
        step, and ``square`` is ``sum_i |d_i|^2``. ``shares`` is the sum of the squared shares, 1 / n for n equal parts;
        with a single part (1), the last step is the other one.
        """
        whole = float(residual.double() @ residual.double())
        if shares < 1:
            signal = (whole - float(square)) / (1 - shares)  # |E d|^2 from products of different parts, very noisy
        else:
            signal = float(residual.double() @ self.before.double()) if len(self.before) else 0.0
            self.before = residual
        size = float(plug.double() @ plug.double()) / reliability**2
        step = torch.tensor([size, max(whole - signal, 0.0), 1.0], dtype=torch.float64)
        self.moments = DECAY * self.moments + step

    def weight(self, share: float, reliability: float) -> float:
        """The residual's weight; ``share`` is f, the plug-in's share of the squared gradient.

        >>> blend = Blend()
        >>> blend.moments = torch.tensor([1.0, 30.0, 1.0], dtype=torch.float64)
        >>> blend.weight(0.25, 1.0)                         # E = 3, V = 30 / 10: w = 1/2
        0.5
        >>> blend.weight(0.25, 0.5), blend.weight(0.25, 0.0)
        (0.75, 1.0)
        """
        plug, noise, steps = self.moments.tolist()
        if not steps or not share > 0 or not plug > 0:
            return 1.0
        missing = plug * (1 - share) / share
        if not missing + noise > 0:
            return 1 - reliability
        return 1 - reliability * (1 - missing / (missing + noise / HORIZON))
