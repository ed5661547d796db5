"""Gradients of log-probabilities in the memory of one microbatch, for any B and G.

Leave-one-out couples the completions of a prompt: each one's coefficient needs the log-probabilities of all. Chunking
the forward pass therefore saves nothing while one backward pass waits for every chunk's graph. But the coefficients are
constants, so they can be computed first: pass 1 takes log-probabilities without gradient; pass 2 recomputes a
microbatch, multiplies by its coefficients, runs backward and frees it. This gives the same gradient, with a peak that
depends on the microbatch alone. Accumulators are float32 on the CPU, one number per trained parameter and prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grade.entropy.samples import Samples
from grade.errors import InputError
from grade.gradients.losses import rloo
from grade.models.backbone import Backbone
from grade.models.parameters import flatten, trained_parameters
from grade.models.scoring import score


@torch.no_grad()
def sequence_logps(backbone: Backbone, samples: Samples, microbatch: int = 8) -> Tensor:
    """``S = sum_t log pi(y_t)`` at the samples' temperature, without gradient.

    Args:
        backbone: The policy.
        samples: Completions.
        microbatch: Completions scored at once.

    Returns:
        [B, G] in nats, float64 on the CPU.
    """
    total = torch.zeros(samples.ids.shape[:2], dtype=torch.float64)
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device):
        logps = score(backbone, prompts, ids, mask, ("logps",), samples.temperature).logps
        total.view(-1)[rows] = logps.sum(-1).double().cpu()
    return total


def entropy_coefficients(logps: Tensor) -> Tensor:
    """Leave-one-out coefficients of ``X_n = sum_g c_ng grad S_ng``, whose expectation is ``-grad H``.

    ``c_ng = (S_ng - mean_{g' != g} S_ng') / G``: the baseline is independent of completion g, so it adds no bias.

    Args:
        logps: S [B, G].

    Returns:
        c [B, G].

    Raises:
        InputError: If G < 2.

    >>> entropy_coefficients(torch.tensor([[1.0, 2.0, 6.0]]))       # (1 - 4) / 3, (2 - 3.5) / 3, (6 - 1.5) / 3
    tensor([[-1.0000, -0.5000,  1.5000]])
    """
    return rloo(logps) / logps.shape[1]


def prompt_gradients(
    backbone: Backbone,
    samples: Samples,
    coefficients: Sequence[Tensor],
    microbatch: int = 2,
    allow_full: bool = False,
) -> list[Tensor]:
    """``sum_g c_ng grad S_ng`` for each prompt n, and each set of coefficients from the same forward passes.

    Args:
        backbone: The policy; its ``.grad`` fields are not touched.
        samples: Completions.
        coefficients: Sets c [B, G].
        microbatch: Completions whose graph exists at once, all of one prompt.
        allow_full: See `trained_parameters`.

    Returns:
        For each set, [B, P] in float32 (float64 for a float64 model) on the CPU, P the number of trained parameters.

    Raises:
        ValueError: If coefficients are not [B, G].
        InputError: If a coefficient is not finite or the microbatch is empty.
    """
    if microbatch < 1:
        raise InputError("microbatch size", microbatch, "at least 1")
    for c in coefficients:
        if c.shape != samples.ids.shape[:2]:
            raise ValueError(f"coefficients have shape {list(c.shape)}, not [B, G] = {list(samples.ids.shape[:2])}")
        if not torch.isfinite(c).all():
            raise InputError("coefficients", "NaN or infinity", "finite rewards and log-probabilities")
    parameters = trained_parameters(backbone, allow_full)
    size = sum(p.numel() for p in parameters)
    batch, group, _ = samples.ids.shape
    sums = [torch.zeros(batch, size, dtype=parameters[0].dtype) for _ in coefficients]
    for n in range(batch):
        one = samples.of_prompts(slice(n, n + 1))
        for rows, prompts, ids, mask in one.microbatches(microbatch, backbone.device):
            logps = score(backbone, prompts, ids, mask, ("logps",), samples.temperature).logps.sum(-1)
            for i, c in enumerate(coefficients):
                weights = c[n, rows].to(logps)
                grads = torch.autograd.grad(logps, parameters, weights, retain_graph=i + 1 < len(coefficients))
                sums[i][n] += flatten(grads).cpu()
            del logps
    return sums
