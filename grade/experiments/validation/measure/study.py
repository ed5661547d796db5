"""The probe's estimators held against the truth, on a policy small enough to enumerate.

Everything is in float64 on a tiny random GPT-2 (whose layer norms do not pass through float32), so the true entropy,
its gradient and its change are known to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from scipy.stats import t as student
from torch import Tensor

from grade.entropy.change import prefix_change, reweighted_change
from grade.entropy.samples import (
    Samples,
    directional,
    draw,
    entropy_coefficients,
    prompt_gradients,
    scores_at,
    sequence_logps,
)
from grade.entropy.ustat import two_batch, u_statistic
from grade.experiments.enumeration import all_as_samples, exact_change, exact_gradient, random_prompts
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.stats import Estimate


def first_order_table(
    policy: Backbone, prompts: PromptBatch, length: int, vector: Tensor, etas: Sequence[float]
) -> pd.DataFrame:
    """Predicted and true change against step size, each way of predicting taken over every completion.

    Columns eta, exact, and for each way (forward, reverse, two_batch) ``eta grad H . v``.
    """
    samples, p = all_as_samples(policy, prompts, length)
    terms = directional(policy, samples, vector, microbatch=256)
    forward = float((p * terms.per_sequence(torch.zeros_like(terms.entropies))).sum(1).mean())
    reverse = float(exact_gradient(policy, prompts, length) @ vector)
    x = prompt_gradients(policy, samples, p * sequence_logps(policy, samples, 256), microbatch=256)
    pair = -two_batch(x, vector.expand(2, -1)).value
    rows = [
        dict(eta=eta, exact=exact_change(policy, prompts, length, vector, eta), forward=eta * forward,
             reverse=eta * reverse, two_batch=eta * pair)
        for eta in etas
    ]  # fmt: skip
    return pd.DataFrame(rows)


def coverage(
    policy: Backbone, length: int, batch: int, group: int, repetitions: int, pool: int = 64, seed: int = 0
) -> dict[str, float]:
    """How often 95 % intervals of the U-statistic hold the true slope, over repeated draws of prompts and completions.

    X is the entropy's leave-one-out gradient, Y that of a reward (the share of token 1) over the same completions, as
    in the single-batch probe. Prompts are drawn from a finite population, over which the truth is enumerated. Gradients
    of every completion of every prompt are computed once; a repetition only draws.

    Coverage of plug-in and jackknife intervals (Student's quantile with B - 1 degrees of freedom), the mean of U,
    its standard error over repetitions, and the truth.
    """
    prompts = random_prompts(policy, pool, seed=1)
    samples, p = all_as_samples(policy, prompts, length)  # [pool, N]
    logps = sequence_logps(policy, samples, 512)
    grads = _completion_gradients(policy, samples)  # [pool, N, P]
    rewards = ((samples.ids == 1) * samples.mask).sum(-1) / samples.mask.sum(-1)
    true_x = torch.einsum("bn,bn,bnp->p", p, logps, grads) / pool
    centred = rewards - (p * rewards).sum(1, keepdim=True)
    true_y = torch.einsum("bn,bn,bnp->p", p, centred.double(), grads) / pool * (group - 1) / group
    truth = float(true_x @ true_y)
    generator, values = torch.Generator().manual_seed(seed), []
    quantile, hits = float(student.ppf(0.975, batch - 1)), {"plug_in": 0, "jackknife": 0}
    for _ in range(repetitions):
        rows = torch.randint(pool, (batch,), generator=generator)
        chosen = torch.multinomial(p[rows], group, replacement=True, generator=generator)  # [B, G]
        g = grads[rows.unsqueeze(1), chosen]  # [B, G, P]
        r = rewards[rows.unsqueeze(1), chosen].double()
        x = torch.einsum("bg,bgp->bp", entropy_coefficients(logps[rows.unsqueeze(1), chosen]), g)
        y = torch.einsum("bg,bgp->bp", (r - r.mean(1, keepdim=True)) / group, g)
        statistic = u_statistic(x, y)
        values.append(statistic.value)
        for name in hits:
            hits[name] += abs(statistic.value - truth) <= quantile * getattr(statistic, name)
    values = np.array(values)
    return {
        "plug_in": hits["plug_in"] / repetitions,
        "jackknife": hits["jackknife"] / repetitions,
        "mean": float(values.mean()),
        "stderr": float(values.std(ddof=1) / math.sqrt(repetitions)),
        "truth": truth,
    }


def _completion_gradients(policy: Backbone, samples: Samples) -> Tensor:
    """``grad S`` of every completion [B, N, P]: one prompt at a time, each completion a "prompt" of one."""
    batch, n, length = samples.ids.shape
    owner = torch.arange(batch).repeat_interleave(n)
    prompts = samples.prompts[owner]
    flat = Samples(prompts, samples.ids.reshape(-1, 1, length), samples.mask.reshape(-1, 1, length))
    grads = prompt_gradients(policy, flat, torch.ones(batch * n, 1), microbatch=1)
    return grads.view(batch, n, -1)


def importance_table(
    policy: Backbone, prompts: PromptBatch, length: int, vector: Tensor, etas: Sequence[float], group: int,
    repetitions: int,
) -> pd.DataFrame:  # fmt: skip
    """Importance sampling against the true change: bias, its standard error, and the estimated standard error.

    One row a step size and way, ``whole`` (`reweighted_change`) or ``prefix`` (`prefix_change`) weights: exact,
    mean, bias_stderr (over repetitions), sd (of an estimate), stderr (its estimate's mean), ess.
    """
    rows = []
    for eta in etas:
        estimates: dict[str, list[tuple[float, float]]] = {"whole": [], "prefix": []}
        ess = []
        for seed in range(repetitions):
            samples = draw(policy, prompts, group, length, torch.Generator().manual_seed(seed), microbatch=4096)
            old, new = scores_at(policy, samples, None, 0.0, 4096), scores_at(policy, samples, vector, eta, 4096)
            whole = reweighted_change(*(x.sum(-1) for x in (old.logps, new.logps, old.entropies, new.entropies)))
            estimates["whole"].append((whole.change, whole.stderr))
            ess.append(whole.ess / (len(prompts) * group))
            moved = prefix_change(old.logps, new.logps, old.entropies, new.entropies)
            estimates["prefix"].append(Estimate.of(moved.mean(1))[:2])
        exact = exact_change(policy, prompts, length, vector, eta)
        for way, values in estimates.items():
            change, stderr = np.array(values).T
            rows.append(dict(
                way=way, eta=eta, exact=exact, mean=change.mean(), sd=change.std(ddof=1),
                bias_stderr=change.std(ddof=1) / math.sqrt(repetitions), stderr=stderr.mean(), ess=np.mean(ess),
            ))  # fmt: skip
    return pd.DataFrame(rows)
