"""The cross-prompt U-statistic and its standard errors, as functions of the prompts' gradients.

For independent prompts with vectors X_n and Y_n [B, P], the mean of ``X_n . Y_m`` over pairs n != m is unbiased for
``E[X] . E[Y]``, though X_n and Y_n come from the same completions:

    U = B / (B - 1) Xbar . Ybar - 1 / (B (B - 1)) sum_n X_n . Y_n

With ``r_n = (X_n . Ybar_{-n} + Y_n . Xbar_{-n}) / 2`` (so mean(r) = U), Hoeffding's decomposition gives
``Var(U) = 4 zeta_1 / B + 2 zeta_2 / (B (B - 1))``, with zeta_1 = Var(E[h | one prompt]) of the symmetric kernel
``h(n, m) = (X_n . Y_m + Y_n . X_m) / 2``.

Left out: the second term, of order 1 / B^2, which the standard errors here do not estimate.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from grade.stats import jackknife_stderr


class _UStatistic(NamedTuple):
    """An estimate of ``E[X] . E[Y]``."""

    value: float  # U
    plug_in: float  # plug-in standard error, ``sqrt(4 var(r) / B)`` with ``var`` over B - 1
    jackknife: float | None  # jackknife standard error, from ``U_{-n} = (B U - 2 r_n) / (B - 2)``; None for B = 2


def u_statistic(x: Tensor, y: Tensor) -> _UStatistic:
    """The U-statistic of ``E[X] . E[Y]`` over two or more units (prompts, or blocks of them), x and y [B, P].

    >>> import torch
    >>> x, y = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[1.0], [0.0], [3.0]])
    >>> u_statistic(x, y).value                    # mean of 1*0, 1*3, 2*1, 2*3, 4*1, 4*0
    2.5
    """
    if x.shape != y.shape or x.ndim != 2:
        raise ValueError(f"x and y have shapes {list(x.shape)} and {list(y.shape)}, not the same [B, P]")
    batch, x, y = len(x), x.double(), y.double()
    sum_x, sum_y, diagonal = x.sum(0), y.sum(0), (x * y).sum(1)
    rows = (x @ sum_y + y @ sum_x - 2 * diagonal) / (2 * (batch - 1))
    value = rows.mean()
    plug_in = (4 * rows.var() / batch).sqrt()
    jackknife = None
    if batch > 2:
        without = (batch * value - 2 * rows) / (batch - 2)
        jackknife = jackknife_stderr(without)
    return _UStatistic(float(value), float(plug_in), jackknife)
