"""The tables of the validation, and the settings that they depend on.

The probe's estimators are held against the truth on a policy small enough to enumerate. Everything is in float64 on a
tiny random GPT-2 (whose layer norms do not pass through float32), so the true entropy, its gradient and its change are
known to rounding.
"""

import math
from functools import cached_property
from typing import Annotated

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from scipy.stats import t as student
from torch import Tensor

from grade.config import Config
from grade.entropy.change import prefix_change, reweighted_change
from grade.entropy.samples import (
    Samples,
    directional,
    draw,
    entropy_coefficients,
    prompt_gradients,
    scores_at,
    sequence_logps,
    two_batch,
)
from grade.experiments.enumeration import (
    all_as_samples,
    exact_change,
    exact_gradient,
    random_direction,
    random_prompts,
    tiny_policy,
)
from grade.experiments.measured import Positive, Several, Size
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.results import progress
from grade.stats import Estimate, jackknife_stderr


class Settings(Config):
    """Sizes of the validation."""

    completion_tokens: Size = 3  # T
    etas: list[Positive] = Field([1e-4, 1e-5, 1e-6], min_length=1)  # step sizes along a unit vector, largest first
    coverage_prompts: list[Annotated[int, Field(ge=3)]] = [8, 32]  # B of the U-statistic
    coverage_group: Several = 4  # G
    coverage_pool: Size = 3  # prompts in the population
    repetitions: Several = 40  # draws whose intervals are counted
    importance_etas: list[Positive] = [0.1, 0.5]  # step sizes of importance sampling
    importance_group: Several = 64  # completions of each prompt
    importance_repetitions: Several = 10  # draws

    @cached_property
    def subject(self) -> tuple[Backbone, PromptBatch, int, Tensor]:
        """Policy, two prompts, T, and the direction of the update."""
        policy = tiny_policy()
        return policy, random_prompts(policy, 2), self.completion_tokens, random_direction(policy)


def _first_order(s: Settings) -> pd.DataFrame:
    """Predicted and true change against step size, each way of predicting taken over every completion."""
    policy, prompts, length, vector = s.subject
    samples, p = all_as_samples(policy, prompts, length)
    terms = directional(policy, samples, vector, microbatch=256)
    forward = float((p * terms.per_sequence(torch.zeros_like(terms.entropies))).sum(1).mean())
    reverse = float(exact_gradient(policy, prompts, length) @ vector)
    x = prompt_gradients(policy, samples, p * sequence_logps(policy, samples, 256), microbatch=256)
    pair = -two_batch(x, vector.expand(2, -1))[0]
    return pd.DataFrame(
        dict(eta=eta, exact=exact_change(policy, prompts, length, vector, eta), forward=eta * forward,
             reverse=eta * reverse, two_batch=eta * pair)
        for eta in s.etas
    )  # fmt: skip


def _coverage(s: Settings) -> pd.DataFrame:
    """How often 95 % intervals of the U-statistic hold the true slope, over repeated draws of prompts and completions.

    X is the entropy's leave-one-out gradient, Y that of a reward (the share of token 1) over the same completions, as
    in the single-batch probe. Prompts are drawn from a finite population, over which the truth is enumerated. Gradients
    of every completion of every prompt are computed once; a repetition only draws. Beside the coverage of plug-in and
    jackknife intervals (Student's quantile with B - 1 degrees of freedom): mean of U with its standard error, truth.
    """
    policy, _, length, _ = s.subject
    pool, group, rows = s.coverage_pool, s.coverage_group, []
    samples, p = all_as_samples(policy, random_prompts(policy, pool, seed=1), length)  # [pool, N]
    logps = sequence_logps(policy, samples, 512)
    grads = _completion_gradients(policy, samples)  # [pool, N, P]
    rewards = ((samples.ids == 1) * samples.mask).sum(-1) / samples.mask.sum(-1)
    true_x = torch.einsum("bn,bn,bnp->p", p, logps, grads) / pool
    centred = rewards - (p * rewards).sum(1, keepdim=True)
    true_y = torch.einsum("bn,bn,bnp->p", p, centred.double(), grads) / pool * (group - 1) / group
    truth = float(true_x @ true_y)
    for batch in progress(s.coverage_prompts, "coverage"):
        generator, values = torch.Generator().manual_seed(0), []
        quantile, hits = float(student.ppf(0.975, batch - 1)), {"plug_in": 0, "jackknife": 0}
        for _ in range(s.repetitions):
            owner = torch.randint(pool, (batch,), generator=generator)
            chosen = torch.multinomial(p[owner], group, replacement=True, generator=generator)  # [B, G]
            owner = owner.unsqueeze(1)
            g, r = grads[owner, chosen], rewards[owner, chosen].double()  # [B, G, P], [B, G]
            x = torch.einsum("bg,bgp->bp", entropy_coefficients(logps[owner, chosen]), g)
            y = torch.einsum("bg,bgp->bp", (r - r.mean(1, keepdim=True)) / group, g)
            value, stderrs = u_statistic(x, y)
            values.append(value)
            for name, stderr in stderrs.items():
                hits[name] += abs(value - truth) <= quantile * stderr
        shares = {name: count / s.repetitions for name, count in hits.items()}
        stderr = float(np.std(values, ddof=1) / math.sqrt(s.repetitions))
        rows.append({"B": batch, "repetitions": s.repetitions} | shares
                    | {"mean": float(np.mean(values)), "stderr": stderr, "truth": truth})  # fmt: skip
    return pd.DataFrame(rows)


def _completion_gradients(policy: Backbone, samples: Samples) -> Tensor:
    """``grad S`` of every completion [B, N, P]: one prompt at a time, each completion a "prompt" of one."""
    batch, n, length = samples.ids.shape
    owner = torch.arange(batch).repeat_interleave(n)
    prompts = samples.prompts[owner]
    flat = Samples(prompts, samples.ids.reshape(-1, 1, length), samples.mask.reshape(-1, 1, length))
    grads = prompt_gradients(policy, flat, torch.ones(batch * n, 1), microbatch=1)
    return grads.view(batch, n, -1)


def _importance(s: Settings) -> pd.DataFrame:
    """Importance sampling by whole completions or prefixes against the true change, over repetitions."""
    (policy, prompts, length, vector), group, n = s.subject, s.importance_group, s.importance_repetitions
    rows = []
    for eta in s.importance_etas:
        estimates: dict[str, list[tuple[float, float]]] = {"whole": [], "prefix": []}
        ess = []
        for seed in range(n):
            samples = draw(policy, prompts, group, length, torch.Generator().manual_seed(seed), microbatch=4096)
            old, new = scores_at(policy, samples, None, 0.0, 4096), scores_at(policy, samples, vector, eta, 4096)
            whole = reweighted_change(old, new)
            estimates["whole"].append((whole.change, whole.stderr))
            ess.append(whole.ess / (len(prompts) * group))
            moved = prefix_change(old, new)
            estimates["prefix"].append(Estimate.of(moved.mean(1))[:2])
        exact = exact_change(policy, prompts, length, vector, eta)
        for way, values in estimates.items():
            change, stderr = np.array(values).T
            sd = change.std(ddof=1)
            rows.append(dict(way=way, eta=eta, exact=exact, mean=change.mean(), sd=sd, bias_stderr=sd / math.sqrt(n),
                             stderr=stderr.mean(), ess=np.mean(ess), repetitions=n))  # fmt: skip
    return pd.DataFrame(rows)


def u_statistic(x: Tensor, y: Tensor) -> tuple[float, dict[str, float]]:
    """The U-statistic of ``E[X] . E[Y]`` over three or more units (prompts, or blocks of them), x and y [B, P].

    For independent units with vectors X_n and Y_n, the mean of ``X_n . Y_m`` over pairs n != m is unbiased, though X_n
    and Y_n come from the same completions. With ``r_n = (X_n . Ybar_{-n} + Y_n . Xbar_{-n}) / 2`` (so mean(r) = U),
    Hoeffding's decomposition gives ``Var(U) = 4 zeta_1 / B + 2 zeta_2 / (B (B - 1))``, with zeta_1 the variance over
    one unit of the mean of the symmetric kernel ``h(n, m) = (X_n . Y_m + Y_n . X_m) / 2``. Left out: the second term,
    of order 1 / B^2.

    U with its standard errors: the plug-in one, ``sqrt(4 var(r) / B)`` with ``var`` over B - 1, and the jackknife's,
    from ``U_{-n} = (B U - 2 r_n) / (B - 2)``.
    """
    batch, x, y = len(x), x.double(), y.double()
    sum_x, sum_y, diagonal = x.sum(0), y.sum(0), (x * y).sum(1)
    rows = (x @ sum_y + y @ sum_x - 2 * diagonal) / (2 * (batch - 1))
    value = rows.mean()
    without = (batch * value - 2 * rows) / (batch - 2)
    return float(value), {"plug_in": float((4 * rows.var() / batch).sqrt()), "jackknife": jackknife_stderr(without)}


TABLES = {"first_order": _first_order, "coverage": _coverage, "importance": _importance}
TIMED = {}
