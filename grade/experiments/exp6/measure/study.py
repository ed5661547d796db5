"""Parity of the engines, time of a gradient, probability mass of a support.

Every function returns plain numbers or a table. Times are wall-clock seconds on the device at hand and only meant as
ratios within one run. Bytes are counted in `grade.experiments.exp6.measure.memory`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.measured import progress
from grade.experiments.setting import Setting
from grade.gradients.estimators import EstimatorName
from grade.gradients.objective import Engine, sequence_mean
from grade.gradients.replay import replay
from grade.gradients.rollout import Rollout
from grade.gradients.unrolled import checkpointed, unrolled
from grade.models.backbone import Backbone
from grade.models.parameters import restoring


def _relative_error(value: Tensor, exact: Tensor) -> float:
    """``|value - exact| / |exact|``, Euclidean norms in float64."""
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def hop_errors(
    setting: Setting, hops: Sequence[int], estimators: Sequence[EstimatorName] = ("ste", "gumbel")
) -> pd.DataFrame:
    """Relative gradient error of `replay` against `unrolled`, by estimator and number of hops.

    Table with columns estimator, hops, error, residual.
    """
    rows = []
    for estimator in estimators:
        case = setting.relaxed(estimator=estimator)
        _, exact = case.run(unrolled)
        for n in progress(hops, f"hops, {estimator}"):
            step, grad = case.run(partial(replay, hops=n))
            residual = None if step.residual is None else float(step.residual)
            rows.append(dict(estimator=estimator, hops=n, error=_relative_error(grad, exact), residual=residual))
    return pd.DataFrame(rows)


def training_parity(setting: Setting, steps: int, learning_rate: float) -> pd.DataFrame:
    """Train twice from the same adapter on the same noise, optimised and legacy, and compare step by step.

    Table with columns step, and reward and kl (means over the batch) of each engine.
    """
    backbone, parameters = setting.backbone, setting.backbone.trainable_parameters()
    columns: dict[str, list[float]] = {}
    for name, engine in (("replay", partial(replay, hops=setting.relaxation.max_new_tokens)), ("legacy", unrolled)):
        with restoring(parameters):
            optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.0)
            for i in progress(range(steps), f"training steps, {name}"):
                generator = torch.Generator(backbone.device).manual_seed(setting.seed + i)
                optimizer.zero_grad(set_to_none=True)
                step = engine(backbone, setting.prompts, setting.objective, setting.relaxation, generator)
                optimizer.step()
                columns.setdefault(f"{name}_reward", []).append(float(step.reward.mean()))
                kl = sequence_mean(step.kl, step.completion_mask).mean()
                columns.setdefault(f"{name}_kl", []).append(float(kl))
    backbone.zero_grad(set_to_none=True)
    return pd.DataFrame({"step": range(steps), **columns})


def accumulation_error(setting: Setting, hops: int = 1) -> float:
    """Relative difference between the gradients of B microbatches of one prompt and of one batch of B."""
    whole = setting.rollout()
    _, exact = setting.run(partial(replay, hops=hops, rollout=whole))
    total = torch.zeros_like(exact)
    for i in range(len(setting.prompts)):
        row = slice(i, i + 1)
        prompts = setting.prompts[row]
        parts = {k: v[row] for k, v in vars(whole).items() if k != "prompts"}
        one = replace(setting, prompts=prompts)
        total += one.run(partial(replay, hops=hops, rollout=Rollout(prompts, **parts)))[1] / len(setting.prompts)
    return _relative_error(total, exact)


def seconds(fn: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, with the device's queue drained before and after."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else (lambda: None)
    wait()
    start = time.perf_counter()
    fn()
    wait()
    return time.perf_counter() - start


def gradient_seconds(setting: Setting, engine: Engine, repeats: int = 1) -> float:
    """Median wall-clock seconds of one gradient, rollout included."""
    return statistics.median(seconds(lambda: setting.run(engine), setting.backbone.device) for _ in range(repeats))


def time_against_tokens(
    setting: Setting, tokens: dict[str, Sequence[int]], hops: int, repeats: int = 1
) -> pd.DataFrame:
    """Seconds of one gradient against completion length.

    Table with columns engine, T, seconds.
    """
    engines = {"unrolled": (unrolled, 1), "checkpointed": (checkpointed, 1),
               "replay": (partial(replay, hops=hops), repeats)}  # fmt: skip
    # The first call of a process pays for set-up.
    gradient_seconds(setting.relaxed(max_new_tokens=2), partial(replay, hops=hops))
    rows = []
    for name, lengths in tokens.items():
        engine, n = engines[name]
        for length in progress(lengths, f"timing {name}"):
            case = setting.relaxed(max_new_tokens=length)
            rows.append(dict(engine=name, T=length, seconds=gradient_seconds(case, engine, n)))
    return pd.DataFrame(rows)


@torch.no_grad()
def support_mass(
    backbone: Backbone, texts: Sequence[str], taus: Sequence[float], ks: Sequence[int], max_tokens: int = 128
) -> pd.DataFrame:
    """Probability mass that the K likeliest tokens of ``softmax(logits / tau)`` hold, at every position of real text.

    Table with columns tau, K, mass (mean over positions), stderr (over texts), p05 (fifth percentile over
    positions), n (positions), texts.
    """
    per_text: dict[tuple[float, int], list[Tensor]] = {(tau, k): [] for tau in taus for k in ks}
    for text in progress(texts, "mass of the support"):
        ids = torch.tensor([backbone.tokenizer(text)["input_ids"][:max_tokens]], device=backbone.device)
        logits = backbone.head(backbone.hidden(backbone.embed(ids), torch.ones_like(ids))[0])  # [L, V]
        top = logits.topk(max(ks), -1).values
        for tau in taus:
            log_total = (logits / tau).logsumexp(-1, keepdim=True)
            mass = (top / tau - log_total).exp().cumsum(-1)
            for k in ks:
                per_text[tau, k].append(mass[:, k - 1].cpu())
    rows = []
    for (tau, k), values in per_text.items():
        pooled, means = torch.cat(values), torch.stack([v.mean() for v in values])
        stderr = float(means.std() / len(means) ** 0.5) if len(means) > 1 else None
        rows.append(dict(tau=tau, K=k, mass=float(pooled.mean()), stderr=stderr,
                         p05=float(pooled.quantile(0.05)), n=len(pooled), texts=len(values)))  # fmt: skip
    return pd.DataFrame(rows)
